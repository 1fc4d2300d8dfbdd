"""The compatibility layer: each patch is needed; with all, the libraries import in silence."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

from t0repro import compat
from t0repro.event_files import event_writer

from .helpers import commands
from .helpers.kept import COMPAT
from .mtf.mesh_commands import run_python

pytestmark = pytest.mark.mtf

# What fails when one patch alone is left out.
NEEDED = {
    "restore_register_tensor_conversion_function": (
        "AttributeError",
        "register_tensor_conversion_function",
    ),
    "restore_estimator_api_name": ("AttributeError", "ESTIMATOR_API_NAME"),
    "provide_tpu_only_modules": ("ImportError", ""),
    "provide_estimator": ("ImportError", "estimator"),
    "provide_torch_absence": ("ModuleNotFoundError", "torch"),
}

# As if torch were not installed.
NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
"""

# Each case in a fork of one process that has imported TensorFlow, which is what takes the time.
WITHOUT_EACH = """
import json, os
from t0repro import compat

compat.quiet_logs()
for left_out in [None, *NAMES]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        outcome = ["", ""]
        try:
            for name in NAMES:
                if name != left_out:
                    getattr(compat, name)()
            import mesh_tensorflow.transformer.utils
            import t5.models
            from t5.models import mesh_transformer_main
            if left_out is None:
                t5.models.HfPyTorchModel("t5-small", "dir")
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            outcome = [kinds, str(error)]
        os.write(writer, json.dumps([left_out, *outcome]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def outcomes(once) -> dict[str | None, tuple[list[str], str]]:
    """Patch left out (None: none) -> the types and the message of what was raised.

    With all patches, a model that needs torch is made after the imports.
    """

    def fill(folder):
        ended = run_python(f"NAMES = {list(NEEDED)!r}\n{NO_TORCH}{WITHOUT_EACH}")
        assert ended.returncode == 0, ended.stderr
        (folder / "outcomes").write_text(ended.stdout)

    folder = once("without_each_patch", fill, COMPAT, Path(__file__))
    answers = map(json.loads, (folder / "outcomes").read_text().splitlines())
    return {left_out: (kinds, message) for left_out, kinds, message in answers}


def test_with_all_patches_the_libraries_import_and_what_needs_torch_says_so(outcomes):
    kinds, message = outcomes[None]
    assert kinds[0] == "ImportError" and "HfPyTorchModel needs" in message
    assert "t0repro[hf]" in message.splitlines()[-1]


@pytest.mark.parametrize("patch", NEEDED)
def test_without_this_patch_the_libraries_do_not_import(outcomes, patch):
    kind, part = NEEDED[patch]
    kinds, message = outcomes[patch]
    assert kind in kinds, message
    assert part in message


INSTALLED = """
from t0repro import compat
compat.install()
import mesh_tensorflow, seqio, t5.data.mixtures, t5.models
from t5.models import mesh_transformer_main
import importlib.util, sys
assert 'keras' not in sys.modules

import tensorflow as tf, tensorflow_estimator, tensorflow_text
assert tf.keras.optimizers.Adam(0.1).learning_rate == 0.1
assert tf.estimator.Estimator is tensorflow_estimator.estimator.Estimator
assert importlib.util.find_spec('tensorflow_estimator')
assert issubclass(tensorflow_text.keras.layers.ToDense, tf.keras.layers.Layer)
from tensorflow_text.python.keras.layers import ToDense
assert ToDense is tensorflow_text.keras.layers.ToDense

from mesh_tensorflow.transformer import utils
patched = utils.get_estimator, utils.decode
compat.install()
compat.keep_ids_when_scoring()
compat.decode_to_text_when_inferring()
assert (utils.get_estimator, utils.decode) == patched

assert tf.estimator.Estimator and tf.compat.v1.estimator.tpu.TPUEstimator
from tensorflow.python.tpu import session_support, tpu_embedding
calls = [session_support.CoordinatorShutdownException, tpu_embedding.TPUEmbedding,
         tpu_embedding.a.b.c]
for call in calls:
    try:
        call(1, key=2)
    except compat.UnsupportedTPUError as error:
        assert '--backend=jax' in str(error), error
    else:
        raise SystemExit(f'{call} did not raise')
"""


def test_install_is_silent_imports_keras_when_it_is_used_is_done_once_and_stand_ins_raise():
    ended = run_python(INSTALLED)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout == ""


# Whether each assignment in a graph of two weights has the gradients of both among its ancestors.
WAITS = """
from t0repro import compat

compat.install()
import mesh_tensorflow as mtf
import tensorflow
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

tf = tensorflow.compat.v1


def waits():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        # Of two shapes: Mesh TensorFlow stacks variables of one shape.
        a = mtf.get_variable(mesh, "a", [mtf.Dimension("a", 4)])
        b = mtf.get_variable(mesh, "b", [mtf.Dimension("b", 5)])
        loss = mtf.reduce_sum(mtf.square(a)) + mtf.reduce_sum(mtf.square(b))
        gradients = mtf.gradients([loss], [a, b])
        optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.1)
        updates = optimizer.apply_grads(gradients, graph.trainable_variables)
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl([], [], [""])})
        wanted = {lowering.tensors[gradient].tensor_list[0].op for gradient in gradients}
        # One operation groups assignments: look at each.
        assignments = {
            operation
            for update in updates
            for operation in ancestors(lowering.lowered_operation(update))
            if operation.type.startswith("Assign")
        }
        return [wanted <= ancestors(assignment) for assignment in assignments]


def ancestors(operation):
    found, waiting = set(), [operation]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return found


with_patch = waits()
mtf.optimize.Optimizer.apply_grads = mtf.optimize.Optimizer.apply_grads.__wrapped__
without_patch = waits()
assert with_patch and all(with_patch), with_patch
assert not all(without_patch), without_patch
"""


def run_in_fork(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fork of a process that has installed the patches."""
    (folder / "in_fork.py").write_text(code)
    return commands.run("in_fork", env={**os.environ, "PYTHONPATH": str(folder)}, cwd=folder)


def test_updates_wait_for_all_gradients_with_the_patch_and_not_without(tmp_path):
    ended = run_in_fork(WAITS, tmp_path)
    assert ended.returncode == 0, ended.stderr


# Which assignments the increment of the global step waits for: in t5's own train graph, with the
# patch and without.
COUNTS = """
from t0repro import compat

compat.install()
import gin
import tensorflow
from mesh_tensorflow.transformer import utils

from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.parity import mesh_run

tf = tensorflow.compat.v1
tf.disable_v2_behavior()
files = ["dataset.gin", "demo/t5.1.1.demo.gin", "learning_rate_schedules/rsqrt_no_ramp_down.gin"]
parameters = [
    "MIXTURE_NAME = 'demo_train'",
    "num_layers = 1",
    "run.train_steps = 2",
    "run.batch_size = ('sequences_per_batch', 2)",
    "run.sequence_length = {'inputs': 8, 'targets': 4}",
    "utils.run.mesh_shape = []",
    "pack_dataset.use_custom_ops = False",
    "run.mode = 'train'",
]
parse(MeshInputs("model", files, parameters, module_imports=["t0repro.tasks.demo"]))


def waited_for():
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        features = {name: tf.zeros([2, 8 if name == "inputs" else 4], tf.int32)
                    for name in ("inputs", "targets")}
        mesh_run._model_function("model")()(features, None, tf.estimator.ModeKeys.TRAIN, params={})
        (increment,) = [x for x in graph.get_operations() if x.type == "AssignAdd"]
        return {x.type for x in increment.control_inputs}, {
            x.inputs[0].op.name for x in increment.control_inputs
        }


kinds, variables = waited_for()
assert kinds == {"Assign"}, kinds
# Parameters, and slots factored or not.
for name in ("shared/embedding", "shared/embedding_slot_vr", "decoder/rms_norm/scale_slot_v"):
    assert any(name in variable for variable in variables), (name, variables)
utils.tpu_estimator_model_fn = utils.tpu_estimator_model_fn.__wrapped__
assert waited_for() == (set(), set())
"""


@pytest.mark.always
def test_a_step_is_counted_after_all_updates_that_read_it(tmp_path):
    ended = run_in_fork(COUNTS, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_install_after_mesh_tensorflow_says_so():
    ended = run_python(
        "import sys, types\n"
        "sys.modules['mesh_tensorflow'] = types.ModuleType('mesh_tensorflow')\n"
        "from t0repro import compat\n"
        "compat.install()\n"
    )
    assert ended.returncode == 1
    assert "call install() first" in ended.stderr


# MRPC, whose two metrics are one group, is best at step 200 and RTE at step 300.
ROWS = {
    step: {
        "eval/glue_rte_v002/accuracy": rte,
        "eval/glue_mrpc_v002/accuracy": mrpc,
        "eval/glue_mrpc_v002/f1": mrpc + 10.0,
    }
    for step, rte, mrpc in ((100, 50.0, 40.0), (200, 62.5, 65.0), (300, 75.0, 60.0))
}


def write_summaries(folder: Path) -> None:
    """As TensorFlow 1 writes them."""
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.summary.FileWriter(str(folder)) as writer:
        for step, row in ROWS.items():
            summary = tf.compat.v1.Summary()
            for tag, value in row.items():
                summary.value.add(tag=tag, simple_value=value)
            writer.add_summary(summary, step)


def write_tensors(folder: Path) -> None:
    """As the JAX stack writes them."""
    writer = event_writer(folder)
    for step, row in ROWS.items():
        writer.write_scalars(step, row)
    writer.close()


@pytest.mark.parametrize("write", [write_summaries, write_tensors])
def test_t5s_parse_tb_writes_its_table_and_the_best_step_of_each_group(tmp_path, write):
    events, table = tmp_path / "validation_eval", tmp_path / "table.csv"
    write(events)
    flags = [f"--summary_dir={events}", f"--out_file={table}"]
    ended = commands.run("t0repro.mtf", "t5.scripts.parse_tb", *flags)
    assert ended.returncode == 0, ended.stderr
    assert table.read_text().splitlines() == [
        "step,MRPC (F1),MRPC (accuracy),GLUE RTE",
        "100,50.000,40.000,50.000",
        "200,75.000,65.000,62.500",
        "300,70.000,60.000,75.000",
        "max,75.000,65.000,75.000",
        "step,200,200,300",
    ]


def test_the_version_of_tensorflow_is_that_of_any_of_its_builds(monkeypatch):
    installed = {"tensorflow": "2.21.0", "t5": "0.9.4"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = [compat.installed_version(name) for name in ("tensorflow", "t5", "seqio")]
    assert found == ["2.21.0", "0.9.4", None]
