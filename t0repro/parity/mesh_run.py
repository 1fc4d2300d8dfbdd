"""Mesh TensorFlow's side of a comparison: the program that `run_mesh` starts in its own process.

It computes exactly what t5's own `utils.run` builds from gin: the model function is intercepted
where t5 passes it to the Estimator, and called with placeholders in place of a dataset, so that
given batches can be fed in and tensors inside the graph can be read.

    python -P -m t0repro.parity.mesh_run jobs.json
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gin
from t0repro import compat
from t0repro.config.mtf.parser import parse
from t0repro.parity.mesh_jobs import ARRAYS, DONE, MeshJob, load_batches
from t0repro.storage import make_folder, write_atomically

Arrays = dict[str, np.ndarray]


def _tensorflow_1() -> Any:
    """TensorFlow 1's API, after compat has patched it; compat must come before the import."""
    compat.install()
    import tensorflow

    return tensorflow.compat.v1


tf = _tensorflow_1()


def main() -> None:
    """Runs every job in the file named on the command line."""
    # Mesh TensorFlow builds graphs; eager execution would end its model function.
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    for values in json.loads(Path(sys.argv[1]).read_text()):
        run_job(MeshJob.from_json(values))


def run_job(job: MeshJob) -> None:
    """Runs one job and writes its results, the marker file last."""
    parse(job.inputs)
    with gin.unlock_config():
        if job.float32:
            for kind in ("slice", "activation"):
                gin.bind_parameter(f"utils.get_variable_dtype.{kind}_dtype", "float32")
        gin.bind_parameter("run.init_checkpoint", job.start)
        gin.bind_parameter("run.mode", "train")
    out = Path(job.out)
    make_folder(out)
    model_fn = _model_function(str(out))
    batches = load_batches(job.batches)
    arrays: Arrays = {}
    with tf.Graph().as_default():
        # Only for parameters that Mesh TensorFlow initializes itself, if there is no start.
        tf.set_random_seed(0)
        start_step, start = _train(model_fn, batches, job, out, arrays)
    if job.tensors:
        with tf.Graph().as_default():
            arrays |= _forward(model_fn, batches[0], start)
    if job.scored:
        with tf.Graph().as_default():
            arrays["scores"] = _score(model_fn, load_batches(job.scored), start)
    np.savez(
        out / ARRAYS, allow_pickle=False, **{name: np.asarray(x) for name, x in arrays.items()}
    )
    write_atomically(out / DONE, str(start_step))


def _model_function(model_dir: str) -> Callable[..., Any]:
    """t5's model function for the gin configuration; keyword arguments override its own.

    `utils.run` runs up to its call of `train_model_fn`, which does nothing here.
    """
    from mesh_tensorflow.transformer import utils

    original = utils.tpu_estimator_model_fn
    found: dict[str, Any] = {}

    def note(**arguments: Any) -> Any:
        found.update(arguments)
        return original(**arguments)

    utils.tpu_estimator_model_fn = note
    with gin.unlock_config():
        gin.bind_parameter("run.train_model_fn", lambda *args, **kwargs: None)
    try:
        # Without a TPU, as t5_mesh_transformer calls it here.
        utils.run(tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None, model_dir=model_dir)
    finally:
        utils.tpu_estimator_model_fn = original
    return lambda **changes: original(**{**found, **changes})


class _Captured:
    """What a model function created while it ran.

    Attributes:
      lowerings: lowerings of the Mesh TensorFlow graph; the last one counts.
      gradients: (variable, gradient) pairs as the optimizer gets them.
      layers: (name, tensor) of what enters each tower, of the residual stream after each sublayer
        and of each tower's output.
      logits: logits of the outermost model.
    """

    def __init__(self) -> None:
        self.lowerings: list[Any] = []
        self.gradients: list[tuple[Any, Any]] = []
        self.layers: list[tuple[str, Any]] = []
        self.logits: Any = None


@contextlib.contextmanager
def _capture() -> Iterator[_Captured]:
    """Records lowerings, gradients, activations and logits while a model function runs."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer

    captured = _Captured()

    class Lowering(mtf.Lowering):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            captured.lowerings.append(self)

    def apply_grads(original: Any, self: Any, grads: Any, variables: Any) -> Any:
        captured.gradients.extend(zip(variables, grads, strict=True))
        return original(self, grads, variables)

    def layer_fn(original: Any, self: Any, x: Any, layer: Any, context: Any) -> Any:
        y = original(self, x, layer, context)
        captured.layers.append((tf.get_variable_scope().name, y))
        return y

    def call(original: Any, self: Any, context: Any, x: Any) -> Any:
        captured.layers.append((f"{tf.get_variable_scope().name}/embedded", x))
        y = original(self, context, x)
        captured.layers.append((f"{tf.get_variable_scope().name}/output", y))
        return y

    def call_simple(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, loss = original(self, *args, **kwargs)
        # The outermost call returns last, so its logits remain.
        captured.logits = logits
        return logits, loss

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replace(mtf, "Lowering", Lowering))
        for owner, name, wrapper in (
            (mtf.optimize.Optimizer, "apply_grads", apply_grads),
            (transformer.LayerStack, "_layer_fn", layer_fn),
            (transformer.LayerStack, "call", call),
            (transformer.Bitransformer, "call_simple", call_simple),
            (transformer.Unitransformer, "call_simple", call_simple),
        ):
            stack.enter_context(_replace(owner, name, _around(getattr(owner, name), wrapper)))
        yield captured


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(original, *args, **kwargs)


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _placeholders(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: tf.placeholder(tf.int32, x.shape, name) for name, x in batch.items()}


def _feed(placeholders: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> dict[Any, Any]:
    return {placeholders[name]: x for name, x in batch.items()}


def _cast_to_float32(lowering: Any, tensor: Any) -> Any:
    return tf.cast(lowering.export_to_tf_tensor(tensor), tf.float32)


def _train(
    model_fn: Callable[..., Any], batches: list, job: MeshJob, out: Path, arrays: Arrays
) -> tuple[int, str]:
    """Trains on the batches; returns the initial global step and checkpoint."""
    step = tf.train.get_or_create_global_step()
    placeholders = _placeholders(batches[0])
    with _capture() as captured, _record_learning_rate() as rates:
        spec = model_fn()(dict(placeholders), None, tf.estimator.ModeKeys.TRAIN, params={})
    lowering = captured.lowerings[-1]
    # The model function's own, so that the comparison reads what t5 would save.
    (saver,) = tf.get_collection(tf.GraphKeys.SAVERS)
    to_slices, to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
    gradients = (
        {v.name: _cast_to_float32(lowering, g) for v, g in captured.gradients}
        if job.tensors
        else {}
    )
    fetches = {"loss": spec.loss}
    if rates:
        fetches["learning_rate"] = rates[-1]
    # Read the loss and the rate before the update, whatever order the threads would take.
    with tf.control_dependencies([*fetches.values()]):
        train_op = tf.group(spec.train_op)
    rows = []
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(to_slices)
        start_step = int(session.run(step))

        def save() -> str:
            # The Saver writes the masters, while updates change the slices.
            session.run(to_masters)
            return saver.save(session, str(out / "model.ckpt"), global_step=step)

        # Save parameters initialized here, so that the JAX side can read them.
        start = job.start or save()
        if gradients:
            found = session.run(gradients, _feed(placeholders, batches[0]))
            arrays |= {f"gradients/{name}": x for name, x in found.items()}
        for done, batch in enumerate(batches, start=1):
            rows.append(session.run([fetches, train_op], _feed(placeholders, batch))[0])
            if done in job.snapshots:
                save()
    arrays["losses"] = np.array([row["loss"] for row in rows])
    arrays["learning_rates"] = np.array([row.get("learning_rate", np.nan) for row in rows])
    return start_step, start


@contextlib.contextmanager
def _record_learning_rate() -> Iterator[list[Any]]:
    """Records the tensor that the model function writes as the summary `learning_rate`."""
    rates: list[Any] = []

    def scalar(original: Any, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "learning_rate":
            rates.append(tensor)
        return original(name, tensor, *args, **kwargs)

    with _replace(tf.summary, "scalar", _around(tf.summary.scalar, scalar)):
        yield rates


def _forward(model_fn: Callable[..., Any], batch: Mapping[str, np.ndarray], start: str) -> Arrays:
    """Activations, logits and token losses of a batch with a checkpoint's parameters."""
    tf.train.get_or_create_global_step()
    placeholders = _placeholders(batch)
    with _capture() as captured:
        spec = model_fn()(dict(placeholders), None, tf.estimator.ModeKeys.EVAL, params={})
    lowering = captured.lowerings[-1]
    wanted = {
        f"activations/{index:03d}/{name}": _cast_to_float32(lowering, tensor)
        for index, (name, tensor) in enumerate(captured.layers)
    }
    wanted[f"activations/{len(captured.layers):03d}/logits"] = _cast_to_float32(
        lowering, captured.logits
    )
    # The first argument of its metric function is the cross entropy of each token.
    wanted["token_losses"] = spec.eval_metrics[1][0]
    (found,) = _evaluate_restored(lowering, start, wanted, [_feed(placeholders, batch)])
    rows = batch["targets"].shape[0]
    # [outer_batch, batch, ...] -> [batch, ...]
    return {name: x.reshape(rows, -1, *x.shape[3:]) for name, x in found.items()}


def _score(model_fn: Callable[..., Any], batches: list, start: str) -> np.ndarray:
    """Log-likelihoods of rows with a checkpoint's parameters, [rows]."""
    tf.train.get_or_create_global_step()
    placeholders = _placeholders(batches[0])
    rows = batches[0]["targets"].shape[0]
    lengths = {name.split("_")[0]: x.shape[1] for name, x in batches[0].items()}
    changes = {"score_in_predict_mode": True, "batch_size": rows, "sequence_length": lengths}
    with _capture() as captured:
        spec = model_fn(**changes)(
            dict(placeholders), None, tf.estimator.ModeKeys.PREDICT, params={}
        )
    feeds = [_feed(placeholders, batch) for batch in batches]
    wanted = [spec.predictions["scores"]]
    found = _evaluate_restored(captured.lowerings[-1], start, wanted, feeds)
    return np.concatenate([values[0] for values in found])


def _evaluate_restored(lowering: Any, start: str, wanted: Any, feeds: list[dict]) -> list[Any]:
    """Evaluates the wanted tensors for each feed, with a checkpoint's variables."""
    results = []
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        # All variables of the graph: slots too, if the graph has any.
        tf.train.Saver(tf.global_variables()).restore(session, start)
        session.run(lowering.copy_masters_to_slices())
        for feed in feeds:
            results.append(session.run(wanted, feed))
    return results


if __name__ == "__main__":
    main()
