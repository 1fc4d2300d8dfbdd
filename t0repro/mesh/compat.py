"""Makes Mesh TensorFlow 0.1.21 and t5 0.9.4 import, train and score on a current TensorFlow.

Both libraries were written against TensorFlow 2.3 to 2.8. What TensorFlow has since moved or dropped
is put back here, and nothing else: no line of either library is replaced by a copy of our own. Each
patch is a function that says why it exists and does nothing where TensorFlow (or the library) still
has, or has again, what is missing. `install()` applies them all; it must run before the first
`import mesh_tensorflow`.

    from t0repro.mesh import compat

    compat.install()
    import mesh_tensorflow
    import t5.models

TPU training through Mesh TensorFlow needs the embedding and session support that TensorFlow 2.16
and later no longer ship. The stand-ins for those modules raise `UnsupportedTPUError` when they are
used, never when they are imported: a CPU run imports them and calls none.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable

_TPU_ONLY_MODULES = (
    "tensorflow.python.distribute.estimator_training",
    "tensorflow.python.tpu.session_support",
    "tensorflow.python.tpu.tpu_embedding",
    "tensorflow.python.tpu.tpu_embedding_gradient",
)

_installed = False


class UnsupportedTPUError(RuntimeError):
    """A code path needs TPU support that the installed TensorFlow no longer has."""


def install() -> None:
    """Applies every patch once, before Mesh TensorFlow is imported.

    Raises:
      RuntimeError: if mesh_tensorflow was imported first, so that patches would come too late.
    """
    global _installed
    if _installed:
        return
    if "mesh_tensorflow" in sys.modules:
        raise RuntimeError(
            "mesh_tensorflow was imported before t0repro.mesh.compat.install(); call install() first."
        )
    quiet_logs()
    restore_register_tensor_conversion_function()
    restore_estimator_api_name()
    provide_tpu_only_modules()
    provide_estimator()
    provide_estimator_side_effects()
    provide_torch_absence()
    defer_patches_of_library_functions()
    _installed = True


def quiet_logs() -> None:
    """Keeps TensorFlow's start-up chatter and the two libraries' deprecation warnings off the terminal.

    An explicit TF_CPP_MIN_LOG_LEVEL or PYTHONWARNINGS of the user's is respected.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    if not sys.warnoptions:
        # Regular expressions for the modules whose warnings concern code that no user can change.
        for module in ("mesh_tensorflow", "t5", "tensorflow_estimator", "tensorflow", "seqio", "keras"):
            for category in (DeprecationWarning, FutureWarning, SyntaxWarning, UserWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"{module}(\..*)?$")
        warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    import tensorflow as tf
    from tensorflow.python.util import deprecation

    # "From FILE: X is deprecated" lines go through the logger, not through warnings.
    deprecation._PRINT_DEPRECATION_WARNINGS = False
    tf.get_logger().addFilter(_no_deprecations)


def _no_deprecations(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "deprecat" not in message and "will be removed" not in message


def restore_register_tensor_conversion_function() -> None:
    """mesh_tensorflow.tpu_variables registers its variables by `ops`; TensorFlow 2.13 moved the function."""
    from tensorflow.python.framework import ops, tensor_conversion_registry

    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )


def restore_estimator_api_name() -> None:
    """tensorflow_estimator 2.15 decorates with tf_export(api_name='estimator'), a name TensorFlow 2.16 dropped."""
    from tensorflow.python.util import tf_export

    if "estimator" not in tf_export.API_ATTRS:
        # The namedtuple's type is private: take it from an entry that is there.
        attributes = type(tf_export.API_ATTRS["tensorflow"])
        tf_export.ESTIMATOR_API_NAME = "estimator"
        tf_export.API_ATTRS["estimator"] = attributes(
            "_estimator_api_names", "_estimator_api_constants"
        )
        tf_export.API_ATTRS_V1["estimator"] = attributes(
            "_estimator_api_names_v1", "_estimator_api_constants_v1"
        )


class _TPUOnlyAttribute:
    """A name of a module that is gone: usable as a value or a base class, an error when called."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise UnsupportedTPUError(
            f"{self._name} was called, but the installed TensorFlow no longer has it. Mesh TensorFlow"
            " runs on CPU here; for an accelerator use --backend=jax."
        )

    def __getattr__(self, name: str) -> _TPUOnlyAttribute:
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
    """Registers stand-ins for the TPU modules that tensorflow_estimator imports and CPU runs never call."""
    for name in _TPU_ONLY_MODULES:
        if name in sys.modules or _has_module(name):
            continue
        stand_in = _TPUOnlyModule(name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        sys.modules[name] = stand_in
        parent, _, child = name.rpartition(".")
        setattr(importlib.import_module(parent), child, stand_in)


def provide_estimator() -> None:
    """Puts tensorflow_estimator where TensorFlow 2.15 and earlier had it: tf.estimator and the tpu modules."""
    import tensorflow as tf

    if not hasattr(tf.compat.v1, "estimator"):
        from tensorflow_estimator._api.v1 import estimator

        # tensorflow.compat.v1 is a lazily wrapped module: `from tensorflow.compat.v1 import estimator`
        # looks it up in sys.modules, attribute access in the wrapper.
        sys.modules["tensorflow.compat.v1.estimator"] = estimator
        tf.compat.v1.estimator = estimator
        tf.estimator = estimator
    for name in ("tpu_config", "tpu_estimator"):
        moved = f"tensorflow.python.tpu.{name}"
        if moved not in sys.modules and not _has_module(moved):
            module = importlib.import_module(f"tensorflow_estimator.python.estimator.tpu.{name}")
            sys.modules[moved] = module
            setattr(importlib.import_module("tensorflow.python.tpu"), name, module)


def provide_torch_absence() -> None:
    """t5.models imports torch for its Hugging Face wrapper; without torch the import must still work.

    Only that wrapper, `t5.models.HfPyTorchModel`, is out of reach then; using it says so.
    """
    import t5

    if _has_module("torch") or "t5.models.hf_model" in sys.modules:
        return

    class HfPyTorchModel:
        """Placeholder: the real class needs PyTorch."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            raise ImportError("t5.models.HfPyTorchModel needs PyTorch: pip install 't0repro[hf]'.")

    stand_in = types.ModuleType("t5.models.hf_model", "Stands in for a module that needs torch.")
    stand_in.HfPyTorchModel = HfPyTorchModel
    sys.modules["t5.models.hf_model"] = stand_in
    del t5


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
