"""Makes Mesh TensorFlow 0.1.21 and t5 0.9.4 import, train and score on a current TensorFlow.

Both libraries were written for TensorFlow 2.3 to 2.8. This module restores what TensorFlow has
since moved or dropped, works around Mesh TensorFlow's faults on CPU, lets Keras be imported only
when it is used, and replaces no code of either library with our own copy. Each patch is a function
whose docstring gives its reason. A patch that restores something does nothing if TensorFlow (or the
library) still has it. `install()` applies them all; it must run before the first `import
mesh_tensorflow`.

    from t0repro import compat

    compat.install()
    import mesh_tensorflow
    import t5.models

TPU training through Mesh TensorFlow needs the embedding and session support that TensorFlow 2.16
and later no longer ship. The stand-ins for those modules raise `UnsupportedTPUError` only when
called, not when imported: a CPU run imports them and calls none of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_TPU_ONLY_MODULES = (
    "tensorflow.python.distribute.estimator_training",
    "tensorflow.python.tpu.session_support",
    "tensorflow.python.tpu.tpu_embedding",
    "tensorflow.python.tpu.tpu_embedding_gradient",
)

# What Mesh TensorFlow, t5 and gin use of tf.estimator, and where it is.
_USED_OF_ESTIMATOR = {
    "CheckpointSaverListener": "tensorflow.python.training.basic_session_run_hooks",
    "EstimatorSpec": "tensorflow_estimator.python.estimator.model_fn",
    "ModeKeys": "tensorflow_estimator.python.estimator.mode_keys",
    "SessionRunHook": "tensorflow.python.training.session_run_hook",
}

# Lines that TensorFlow's C++ libraries print while loading, before any log level takes effect.
_START_UP_LINES = (
    b"before absl::InitializeLog()",
    b"cudart_stub.cc",  # there is no CUDA driver
    b"failed call to cuInit",  # the same, at the first look for devices
)

# Log lines that do not help the user: deprecations inside the libraries, places where gin looks
# before it finds a file, and the missing TPU.
_USELESS_LOG_LINES = (
    "deprecat",
    "will be removed",
    "Path not found: ",
    "system_path_file_exists:",
    "eval_on_tpu ignored",
    "Using default tf glorot_uniform_initializer",
    "global step (tf.train.get_global_step) has not been increased",  # it is read in mid-step
    "is being approximated by decoding from the tokenized",  # in every score_eval
    "AUC-pr and AUC-roc are not supported when num_classes > 2",  # from t5's rank classification
    # T0's lengths are given, as T0's README gives them.
    "Given sequence lengths are longer than necessary",
    # Printed for every task. t0repro.data.checks reports it once; a resumed run here continues
    # after the examples that it has read.
    "Using an uncached FunctionDataset for training",
    # TensorBoard's reader, of the graphs in Mesh TensorFlow's training runs: scalars are read.
    "Found more than one graph event per run",
    "Found more than one metagraph event per run",
)

# Modules whose Python warnings concern code that users of this package cannot change.
_QUIET_MODULES = (
    "absl",
    "apache_beam",
    "flatbuffers",
    "gin",
    "google",
    "keras",
    "mesh_tensorflow",
    "seqio",
    "sklearn",  # metrics that few examples leave undefined
    "t5",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_estimator",
    "tensorflow_text",
)

# Packages that hold the module tensorflow; the first is the reference tier's.
_TENSORFLOWS = ("tensorflow-cpu", "tensorflow", "tensorflow-macos", "tf-nightly")

_installed = False


class UnsupportedTPUError(RuntimeError):
    """A code path needs TPU support that the installed TensorFlow no longer has."""


def install() -> None:
    """Applies every patch once, before Mesh TensorFlow is imported.

    Raises:
      RuntimeError: If mesh_tensorflow was imported first, in which case patches come too late.
    """
    global _installed
    if _installed:
        return
    if "mesh_tensorflow" in sys.modules:
        raise RuntimeError(
            "mesh_tensorflow was imported before t0repro.compat.install(): call install() first."
        )
    # First, because the patches import TensorFlow, which prints its start-up lines then.
    quiet_logs()
    restore_register_tensor_conversion_function()
    restore_estimator_api_name()
    provide_tpu_only_modules()
    provide_estimator()
    provide_text_layers_when_used()
    provide_torch_absence()
    # From here on the patches import Mesh TensorFlow, which the patches above make possible.
    update_after_all_gradients()
    count_a_step_after_its_updates()
    keep_ids_when_scoring()
    decode_to_text_when_inferring()
    _installed = True


def is_installed() -> bool:
    """Whether SeqIO can be imported; the reference tier installs it together with the rest."""
    return importlib.util.find_spec("seqio") is not None


def installed_version(package: str) -> str | None:
    """A package's version; None if it is not installed. "tensorflow" stands for each of its builds.

    Args:
      package: Its name on PyPI.
    """
    for name in _TENSORFLOWS if package == "tensorflow" else (package,):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def quiet_native_logs() -> None:
    """Sets the level of TensorFlow's C++ log, in which its warnings repeat for every task.

    Errors remain, and so does a level that the user has set. JAX sets another if imported first.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def quiet_logs() -> None:
    """Keeps TensorFlow's start-up chatter and the libraries' deprecation warnings off the terminal.

    TF_CPP_MIN_LOG_LEVEL and PYTHONWARNINGS are respected if the user has set them.
    """
    os.environ.setdefault(
        "TF_ENABLE_ONEDNN_OPTS", "0"
    )  # also keeps CPU results the same everywhere
    if not sys.warnoptions:
        for category in (DeprecationWarning, FutureWarning, SyntaxWarning, UserWarning):
            for module in _QUIET_MODULES:
                warnings.filterwarnings("ignore", category=category, module=rf"{module}(\..*)?$")
        warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    quiet_native_logs()
    loud = os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    with contextlib.nullcontext() if loud else _drop_lines(_START_UP_LINES), _keras_deferred():
        import tensorflow as tf
        from tensorflow.python.util import deprecation

        tf.config.list_physical_devices("GPU")  # makes it look for a driver, and complain, now

    # "From FILE: X is deprecated" lines go through the logger, not through warnings.
    deprecation._PRINT_DEPRECATION_WARNINGS = False
    for name in ("tensorflow", "tensorboard", "absl", "root"):
        logging.getLogger(name).addFilter(_is_of_use)


@contextlib.contextmanager
def _keras_deferred() -> Iterator[None]:
    """Keeps TensorFlow's import from importing Keras, which `tf.keras` then does when first used.

    TensorFlow does it so that optimizers in SavedModels are registered. With scikit-learn and
    pandas, which Keras imports, it takes half of the processor time of TensorFlow's import.
    """
    import_module = importlib.import_module

    def import_without_keras(name: str, package: str | None = None) -> types.ModuleType:
        if name in ("keras.src.optimizers", "tf_keras.src.optimizers"):
            raise ImportError(f"{name} is imported when first used")  # TensorFlow ignores it
        return import_module(name, package)

    importlib.import_module = import_without_keras
    try:
        yield
    finally:
        importlib.import_module = import_module


@contextlib.contextmanager
def _drop_lines(unwanted: tuple[bytes, ...]) -> Iterator[None]:
    """Buffers what is written to file descriptor 2, then prints it without the unwanted lines."""
    # Use the descriptor, not sys.stderr: the lines come from C++, which bypasses sys.stderr.
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        terminal = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            for line in held:
                if not any(part in line for part in unwanted):
                    os.write(2, line)


def _is_of_use(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(part in message for part in _USELESS_LOG_LINES)


def restore_register_tensor_conversion_function() -> None:
    """Puts the function back into `ops`, where mesh_tensorflow.tpu_variables looks for it.

    TensorFlow 2.13 moved it to another module.
    """
    from tensorflow.python.framework import ops, tensor_conversion_registry

    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )


def restore_estimator_api_name() -> None:
    """Restores the API name 'estimator', which TensorFlow 2.16 dropped.

    tensorflow_estimator 2.15 exports its symbols under it.
    """
    from tensorflow.python.util import tf_export

    if "estimator" not in tf_export.API_ATTRS:
        # The namedtuple's type is private, so take it from an existing entry.
        attributes = type(tf_export.API_ATTRS["tensorflow"])
        tf_export.ESTIMATOR_API_NAME = "estimator"
        tf_export.API_ATTRS["estimator"] = attributes(
            "_estimator_api_names", "_estimator_api_constants"
        )
        tf_export.API_ATTRS_V1["estimator"] = attributes(
            "_estimator_api_names_v1", "_estimator_api_constants_v1"
        )


class _TPUOnlyAttribute:
    """A name in a module that is gone: it can be imported and referred to, but not called."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise UnsupportedTPUError(
            f"{self._name} was called, but the installed TensorFlow no longer has it. Mesh"
            " TensorFlow runs on CPU here; for an accelerator use --backend=jax."
        )

    def __getattr__(self, name: str) -> _TPUOnlyAttribute:
        # Python probes for dunder names; they must be absent here, not stand-ins.
        if name.startswith("__"):
            raise AttributeError(name)
        return _TPUOnlyAttribute(f"{self._name}.{name}")


class _TPUOnlyModule(types.ModuleType):
    """Stand-in for a TensorFlow module that only TPU runs call."""

    def __getattr__(self, name: str) -> _TPUOnlyAttribute:
        if name.startswith("__"):
            raise AttributeError(name)
        return _TPUOnlyAttribute(f"{self.__name__}.{name}")


def provide_tpu_only_modules() -> None:
    """Registers stand-ins for TPU modules that tensorflow_estimator imports and CPU never calls."""
    for name in _TPU_ONLY_MODULES:
        if name in sys.modules or _has_module(name):
            continue
        stand_in = _TPUOnlyModule(name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        sys.modules[name] = stand_in
        parent, _, child = name.rpartition(".")
        # An import that finds a module in sys.modules does not set it in its parent.
        setattr(importlib.import_module(parent), child, stand_in)


class _ModuleWhenUsed(types.ModuleType):
    """A package whose names are imported when first used, from the modules that have them."""

    def __init__(self, name: str, everything: str, elsewhere: Mapping[str, str]):
        """Describes where its names are.

        Args:
          name: The package's name; its submodules can be imported, and its own code is not run.
          everything: The module that has each name which is not in `elsewhere`.
          elsewhere: Names, and the modules that have them.
        """
        super().__init__(name)
        self._everything, self._elsewhere = everything, elsewhere
        top, *below = name.split(".")
        # Of the topmost package: to look for a package inside another runs the outer one's code.
        found = importlib.util.find_spec(top)
        folders = (found and found.submodule_search_locations) or ()
        self.__path__ = [os.path.join(folder, *below) for folder in folders]
        # Without one, importlib.util.find_spec raises a ValueError for a module that is imported.
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = importlib.import_module(self._elsewhere.get(name, self._everything))
        # A submodule is the value itself.
        value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
        setattr(self, name, value)
        return value


def provide_estimator() -> None:
    """Puts tensorflow_estimator where TensorFlow 2.15 had it: tf.estimator and two tpu modules.

    Its package imports the whole API, which has canned models of every kind and with them Keras.
    """
    import tensorflow as tf

    # Import it by name: that yields a second module object, which then replaces tf.compat.v1.
    v1 = importlib.import_module("tensorflow.compat.v1")
    if not hasattr(v1, "estimator"):
        api = "tensorflow_estimator._api.v1.estimator"
        estimator = _ModuleWhenUsed("tensorflow_estimator", api, _USED_OF_ESTIMATOR)
        sys.modules.setdefault("tensorflow_estimator", estimator)
        tf.estimator = v1.estimator = estimator
    for name in ("tpu_config", "tpu_estimator"):
        moved = f"tensorflow.python.tpu.{name}"
        if moved not in sys.modules and not _has_module(moved):
            module = importlib.import_module(f"tensorflow_estimator.python.estimator.tpu.{name}")
            sys.modules[moved] = module
            setattr(importlib.import_module("tensorflow.python.tpu"), name, module)


def provide_text_layers_when_used() -> None:
    """Keeps tensorflow_text, whose operations SeqIO uses, from importing its layers for Keras."""
    name = "tensorflow_text.python.keras"
    if importlib.util.find_spec("tensorflow_text") and "tensorflow_text" not in sys.modules:
        sys.modules[name] = _ModuleWhenUsed(name, f"{name}.layers", {})


def provide_torch_absence() -> None:
    """Lets t5.models, which imports torch for its Hugging Face wrapper, be imported without torch.

    Only that wrapper, `t5.models.HfPyTorchModel`, is unavailable then; it raises ImportError.
    """
    if _has_module("torch") or "t5.models.hf_model" in sys.modules:
        return

    class HfPyTorchModel:
        """Placeholder: the real class needs PyTorch."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            raise ImportError("t5.models.HfPyTorchModel needs PyTorch: pip install 't0repro[hf]'.")

    stand_in = types.ModuleType("t5.models.hf_model", "Stands in for a module that needs torch.")
    vars(stand_in)["HfPyTorchModel"] = HfPyTorchModel
    sys.modules["t5.models.hf_model"] = stand_in


def update_after_all_gradients() -> None:
    """Makes every update wait for all gradients; without this, training on CPU has a data race.

    Off TPU the variables are TensorFlow's reference variables, which are read in place, and an
    optimizer's update waits only for its own gradient, so weights are overwritten while the
    backward pass still reads them. The slots after one step then depend on the learning rate, by up
    to a third of their RMS, and differ from run to run. On TPU a step is a function of its inputs.
    decision 02 has the measurements.
    """
    import mesh_tensorflow as mtf

    original = mtf.optimize.Optimizer.apply_grads
    # Called again, it would wrap its own wrapper.
    if getattr(original, "_t0repro_patch", False):
        return

    @functools.wraps(original)
    def apply_grads(self: Any, grads: Any, variables: Any) -> Any:
        # Parameters that the loss does not reach have no gradient; there is nothing to wait
        # for.
        # The first `depend`, on nothing, completes a gradient's pending sum over the mesh, if
        # `run.mesh_shape` has dimensions; nothing can depend on a pending sum.
        whole = [grad if grad is None else mtf.depend(grad, []) for grad in grads]
        present = [grad for grad in whole if grad is not None]
        waiting = [grad if grad is None else mtf.depend(grad, present) for grad in whole]
        return original(self, waiting, variables)

    vars(apply_grads)["_t0repro_patch"] = True
    mtf.optimize.Optimizer.apply_grads = apply_grads


def count_a_step_after_its_updates() -> None:
    """Makes the increment of the global step wait for all updates; without this there is a race.

    Adafactor's decay rate and the learning rate are computed from the step, a reference variable
    that off TPU the same run increments, in no order. Where the increment comes first, slots decay
    by the next step's rate. TensorFlow reorders a graph's operations as it learns what they cost;
    in the demo's training run, the increment began to come first at about step 94.
    """
    from mesh_tensorflow.transformer import utils

    original = utils.tpu_estimator_model_fn
    if getattr(original, "_t0repro_patch", False):
        return

    @functools.wraps(original)
    def tpu_estimator_model_fn(*args: Any, **kwargs: Any) -> Any:
        model_fn = original(*args, **kwargs)

        # The Estimator looks at the arguments' names.
        def ordered(
            features: Any, labels: Any, mode: Any, params: Any = None, config: Any = None
        ) -> Any:
            spec = model_fn(features, labels, mode, params=params, config=config)
            if spec.train_op is not None:
                _increment_last(spec.train_op)
            return spec

        return ordered

    vars(tpu_estimator_model_fn)["_t0repro_patch"] = True
    utils.tpu_estimator_model_fn = tpu_estimator_model_fn


def _increment_last(train_op: Any) -> None:
    """Lets the increment of the global step wait for every other assignment of an update.

    Waiting for what reads the step is not enough: TensorFlow turns `step - 0` into the step itself,
    whose memory is then read later.
    """
    import tensorflow

    step = tensorflow.compat.v1.train.get_global_step().op
    seen: set[Any] = set()
    waiting = [getattr(train_op, "op", train_op)]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    assignments = [x for x in seen if x.type.startswith("Assign")]
    of_step = [x for x in assignments if x.inputs[0].op is step]
    for increment in of_step:
        increment._add_control_inputs([x for x in assignments if x not in of_step])


class _IdsOnlyVocabulary:
    """Hides a vocabulary's `decode_tf`, so that Mesh TensorFlow's graph returns ids, not text."""

    def __init__(self, vocabulary: Any):
        self._vocabulary = vocabulary

    def __getattr__(self, name: str) -> Any:
        if name == "decode_tf":
            raise AttributeError(name)
        return getattr(self._vocabulary, name)


def keep_ids_when_scoring() -> None:
    """Makes scoring on CPU return token ids, as it does on TPU; without this score_eval fails.

    Off TPU the model function decodes the targets to text in the graph if the vocabulary can
    (`decode_tf`, which every SeqIO vocabulary has by now), and `save_scores` then mistakes that
    text for ids: "'bytes' object has no attribute 'tolist'". Ids also preserve the lengths that it
    writes.
    """
    from mesh_tensorflow.transformer import utils

    original = utils.get_estimator
    if getattr(original, "_t0repro_patch", False):
        return

    @functools.wraps(original)
    def get_estimator(*args: Any, **kwargs: Any) -> Any:
        # `run` passes every argument by name.
        if kwargs.get("score_in_predict_mode") and not kwargs.get("use_tpu"):
            vocabulary = kwargs["vocabulary"]
            if isinstance(vocabulary, tuple):
                kwargs["vocabulary"] = tuple(map(_IdsOnlyVocabulary, vocabulary))
            else:
                kwargs["vocabulary"] = _IdsOnlyVocabulary(vocabulary)
        return original(*args, **kwargs)

    vars(get_estimator)["_t0repro_patch"] = True
    utils.get_estimator = get_estimator


def decode_to_text_when_inferring() -> None:
    """Makes `decode` yield text; without this, infer on CPU writes lines that read b'...'.

    Off TPU the graph returns bytes, which `decode` passes on and `write_lines_to_file` formats with
    their Python repr.
    """
    from mesh_tensorflow.transformer import utils

    original = utils.decode
    if getattr(original, "_t0repro_patch", False):
        return

    @functools.wraps(original)
    def decode(*args: Any, **kwargs: Any) -> Iterator[str]:
        for line in original(*args, **kwargs):
            yield line.decode("utf-8") if isinstance(line, bytes) else line

    vars(decode)["_t0repro_patch"] = True
    utils.decode = decode


def sum_up_metrics_with_current_pandas() -> None:
    """Lets t5.scripts.parse_tb summarize its table on pandas 2 and later.

    `eval_utils.metric_group_max`, which only that script calls, selects columns with a set and
    iterates over a Series with `iteritems`; pandas 2.0 dropped both. It is not one of `install`'s
    patches because it has to import all of t5.
    """
    import pandas as pd
    from t5.evaluation import eval_utils

    if not hasattr(pd.Series, "iteritems"):
        setattr(pd.Series, "iteritems", pd.Series.items)  # noqa: B010

    original = eval_utils.metric_group_max
    if getattr(original, "_t0repro_patch", False):
        return

    class _ColumnsBySet(pd.DataFrame):
        """A DataFrame whose columns can be selected with a set."""

        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(sorted(key) if isinstance(key, set) else key)

    @functools.wraps(original)
    def metric_group_max(df: Any, metric_names: Any = None) -> Any:
        return original(_ColumnsBySet(df), metric_names)

    vars(metric_group_max)["_t0repro_patch"] = True
    eval_utils.metric_group_max = metric_group_max


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
