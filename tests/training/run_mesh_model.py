"""Runs Mesh TensorFlow's own model, loss, optimizer and scores on given batches.

A script for a process of its own: Mesh TensorFlow wants graph mode and process-wide gin state.

    python run_mesh_model.py '[{"out": ..., "batches": ..., "bindings": ..., ...}]'

A job names gin `bindings`, a file of `batches` ("<index>/<feature>"), `start_step`,
`num_microbatches`, a `schedule` with its `arguments` and `total_train_steps`. Its results in `out`:

    losses, learning_rates            per step, from start_step on
    gradients/<variable>              of the first step
    initial/, first/, last/<variable> parameters and slots before, after one and after all steps
    scores, score_logits              of the first batch, unpacked, by the initial parameters

With "buckets" in place of "batches" it writes the relative-position buckets of offsets up to that.
"""

from __future__ import annotations

import functools
import json
import os
import sys

VOCABULARY = 250


def main() -> None:
    from t0repro import compat

    compat.install()
    import mesh_tensorflow.transformer.utils as utils
    import numpy as np
    import t5.models
    import tensorflow.compat.v1 as tf

    import gin

    tf.disable_v2_behavior()
    # With reference variables an update of one variable can come before another's gradient reads
    # it: consumers share the variable's buffer. A resource variable is read once, before updates.
    tf.enable_resource_variables()
    for module in (t5.models, utils):
        gin.add_config_file_search_path(os.path.join(os.path.dirname(module.__file__), "gin"))
    for job in json.loads(sys.argv[1]):
        if "buckets" in job:
            results = position_buckets(job["buckets"])
        else:
            gin.clear_config()
            gin.parse_config(job["bindings"])
            batches = read_batches(np.load(job["batches"]))
            results = train(job, batches)
            results |= score(job, batches[0], results)
        np.savez(job["out"], **results)


def read_batches(arrays) -> list[dict]:
    """Batches of a file of "<index>/<feature>"."""
    batches: dict[int, dict] = {}
    for key in arrays.files:
        index, _, feature = key.partition("/")
        batches.setdefault(int(index), {})[feature] = arrays[key]
    return [batches[index] for index in sorted(batches)]


def build(batch, mode: str, num_microbatches: int = 1):
    """The graph of a model on placeholders, as tpu_estimator_model_fn builds it."""
    import mesh_tensorflow as mtf
    import mesh_tensorflow.transformer.utils as utils
    import tensorflow.compat.v1 as tf

    model = utils.build_model(
        "bitransformer", VOCABULARY, VOCABULARY, mtf.convert_to_layout_rules([]), mtf.Shape([])
    )
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch_dim = mtf.Dimension("batch", batch["inputs"].shape[0])
    placeholders = {name: tf.placeholder(tf.int32, x.shape, name) for name, x in batch.items()}
    features = {
        name: mtf.import_fully_replicated(
            mesh,
            placeholders[name],
            mtf.Shape([batch_dim, mtf.Dimension("length", x.shape[1])]),
            name=name,
        )
        for name, x in batch.items()
    }

    def call(features, parts=1):
        return model.call_simple(
            inputs=features["inputs"],
            targets=features["targets"],
            compute_loss=mode != "score",
            mode=mode,
            encoder_sequence_id=features.get("inputs_segmentation"),
            decoder_sequence_id=features.get("targets_segmentation"),
            encoder_position=features.get("inputs_position"),
            decoder_position=features.get("targets_position"),
            num_microbatches=parts,
        )

    if mode == "score":
        logits, _ = call(features)
        _, length_dim, vocab_dim = logits.shape.dims
        losses = mtf.layers.softmax_cross_entropy_with_logits(
            logits, features["targets"], vocab_dim
        )
        losses *= mtf.cast(mtf.greater(features["targets"], 0), losses.dtype)
        outputs = [logits, -mtf.reduce_sum(losses, reduced_dim=length_dim)]
    elif num_microbatches > 1:
        gradients, totals = mtf.serialize_training_step(
            features,
            lambda part: {"loss": call(part, num_microbatches)[1]},
            batch_dim,
            num_microbatches,
        )
        outputs = [totals["loss"], gradients]
    else:
        _, loss = call(features)
        gradients = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        outputs = [loss, gradients]
    return graph, mesh, placeholders, outputs


def lower(graph, mesh):
    """The TensorFlow graph of a Mesh TensorFlow graph on one CPU."""
    import mesh_tensorflow as mtf

    implementation = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), [], [""])
    return mtf.Lowering(graph, {mesh: implementation}, autostack=False)


def train(job, batches) -> dict:
    """Steps with Mesh TensorFlow's optimizer through all batches."""
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import learning_rate_schedules

    with tf.Graph().as_default():
        tf.set_random_seed(0)
        global_step = tf.train.get_or_create_global_step()
        graph, mesh, placeholders, (loss, gradients) = build(
            batches[0], "train", job["num_microbatches"]
        )
        schedule = functools.partial(
            getattr(learning_rate_schedules, job["schedule"]),
            total_train_steps=job["total_train_steps"],
            **job["arguments"],
        )
        learning_rate = schedule(step=global_step)
        variables = list(graph.trainable_variables)
        optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=learning_rate)
        updates = optimizer.apply_grads(gradients, variables)
        lowering = lower(graph, mesh)
        fetches = [lowering.export_to_tf_tensor(loss), learning_rate]
        exported = {
            v.name: lowering.export_to_tf_tensor(g)
            for v, g in zip(variables, gradients, strict=True)
        }
        operations = [lowering.lowered_operation(operation) for operation in updates]
        with tf.control_dependencies(fetches):
            train_op = tf.group([*operations, tf.assign_add(global_step, 1)])
        save, restore = lowering.copy_slices_to_masters(), lowering.copy_masters_to_slices()
        names = {v.name for v in graph.all_variables}
        masters = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            global_step.load(job["start_step"], session)
            session.run(restore)

            def run(batch, wanted):
                return session.run(wanted, {placeholders[name]: x for name, x in batch.items()})

            def snapshot(prefix):
                session.run(save)
                return {f"{prefix}/{name}": x for name, x in session.run(masters).items()}

            results = snapshot("initial")
            found = run(batches[0], exported)
            results |= {f"gradients/{name}": x for name, x in found.items()}
            rows = []
            for index, batch in enumerate(batches):
                rows.append(run(batch, [*fetches, train_op])[:2])
                if index == 0:
                    results |= snapshot("first")
            results |= snapshot("last")
    losses, rates = zip(*rows, strict=True)
    return results | {"losses": losses, "learning_rates": rates}


def score(job, batch, results) -> dict:
    """Logits and scores in mode "score", where nothing is packed."""
    import tensorflow.compat.v1 as tf

    batch = {name: batch[name] for name in ("inputs", "targets")}
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        graph, mesh, placeholders, outputs = build(batch, "score")
        lowering = lower(graph, mesh)
        logits, scores = [lowering.export_to_tf_tensor(output) for output in outputs]
        restore = lowering.copy_masters_to_slices()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for variable in tf.global_variables():
                if f"initial/{variable.op.name}" in results:
                    variable.load(results[f"initial/{variable.op.name}"], session)
            session.run(restore)
            feed = {placeholders[name]: x for name, x in batch.items()}
            logits, scores = session.run([logits, scores], feed)
    return {"score_logits": logits, "scores": scores}


def position_buckets(furthest: int) -> dict:
    """Buckets of offsets -furthest to furthest, both ways."""
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import transformer_layers

    with tf.Graph().as_default(), tf.Session() as session:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        offsets = mtf.range(mesh, mtf.Dimension("offset", 2 * furthest + 1), tf.int32) - furthest
        both = [
            transformer_layers._relative_position_bucket(offsets, bidirectional=way)
            for way in (True, False)
        ]
        lowering = lower(graph, mesh)
        bidirectional, causal = session.run([lowering.export_to_tf_tensor(x) for x in both])
    return {"bidirectional": bidirectional, "causal": causal}


if __name__ == "__main__":
    main()
