"""Takes one training step on a tiny graph, to prove that Mesh TensorFlow works here.

`t0repro doctor` runs `main` in its own process.
"""

from __future__ import annotations

import json


def main() -> None:
    """Prints {"before": loss, "after": loss} of one Adafactor step.

    Raises:
      RuntimeError: If the step did not lower the loss.
    """
    before, after = train_one_step()
    if not after < before:
        raise RuntimeError(f"one step took the loss from {before} to {after}")
    print(json.dumps({"before": before, "after": after}))


def train_one_step() -> tuple[float, float]:
    """Losses of a linear model before and after one step of Mesh TensorFlow's Adafactor."""
    from t0repro import compat

    compat.install()
    import mesh_tensorflow as mtf
    import tensorflow
    from mesh_tensorflow.optimize import AdafactorOptimizer
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

    tf = tensorflow.compat.v1
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 4)
        inputs = mtf.import_tf_tensor(
            mesh, tf.random.stateless_normal([8, 4], [0, 1]), [batch, width]
        )
        weights = mtf.get_variable(
            mesh, "weights", [width], initializer=tf.constant_initializer(1.0)
        )
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([inputs, weights], output_shape=[batch])))
        gradients = mtf.gradients([loss], [weights])
        updates = AdafactorOptimizer(learning_rate=0.1).apply_grads(
            gradients, graph.trainable_variables
        )
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl([], [], [""])})
        value = lowering.export_to_tf_tensor(loss)
        step = [lowering.lowered_operation(update) for update in updates]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(lowering.copy_masters_to_slices())
            before = float(session.run(value))
            session.run(step)
            return before, float(session.run(value))
