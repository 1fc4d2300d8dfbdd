"""Runs Mesh TensorFlow's own optimizers and learning-rate schedules on given numbers.

A script for a process of its own: Mesh TensorFlow wants graph mode and process-wide gin state.

    python run_mesh_optimizers.py '{"in": ..., "out": ..., "optimizers": ..., "schedules": ...}'

`in` holds parameters and, for each step, gradients ("parameters/<variable>", "<step>/<variable>").
`optimizers` gives each job's class, its gin bindings, learning rate and first global step; its
results in `out` are "<job>/<step>/<variable or slot>" after that step. `schedules` gives gin
bindings and steps; the results are "<job>/rates".
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from t0repro import compat

    compat.install()
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    # As in run_mesh_model.py: a resource variable is read before it is updated.
    tf.enable_resource_variables()
    job = json.loads(sys.argv[1])
    with np.load(job["in"]) as given:
        arrays = dict(given)
    results = {}
    for name, optimizer in job["optimizers"].items():
        results |= {f"{name}/{key}": x for key, x in run_optimizer(arrays, **optimizer).items()}
    for name, schedule in job["schedules"].items():
        results[f"{name}/rates"] = run_schedule(**schedule)
    np.savez(job["out"], **results)


def run_optimizer(arrays, cls: str, bindings: str, learning_rate, start_step: int) -> dict:
    """Variables after each step."""
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf

    import gin

    gin.clear_config()
    gin.parse_config(bindings)
    results = {}
    with tf.Graph().as_default():
        global_step = tf.train.get_or_create_global_step()
        mesh = mtf.Mesh(graph := mtf.Graph(), "mesh")
        parameters = {
            name.removeprefix("parameters/"): x
            for name, x in arrays.items()
            if name.startswith("parameters/")
        }
        placeholders, gradients = {}, []
        for name, x in parameters.items():
            dims = [mtf.Dimension(f"{name}{axis}", size) for axis, size in enumerate(x.shape)]
            mtf.get_variable(mesh, name, mtf.Shape(dims))
            placeholders[name] = tf.placeholder(tf.float32, x.shape)
            gradients.append(
                mtf.import_fully_replicated(mesh, placeholders[name], mtf.Shape(dims), name=name)
            )
        variables = list(graph.trainable_variables)
        optimizer = getattr(mtf.optimize, cls)(learning_rate=learning_rate)
        updates = optimizer.apply_grads(gradients, variables)
        implementation = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), [], [""])
        lowering = mtf.Lowering(graph, {mesh: implementation}, autostack=False)
        operations = [lowering.lowered_operation(operation) for operation in updates]
        train_op = tf.group([*operations, tf.assign_add(global_step, 1)])
        names = {v.name for v in graph.all_variables}
        masters = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            global_step.load(start_step, session)
            for name, x in parameters.items():
                masters[name].load(x, session)
            session.run(lowering.copy_masters_to_slices())
            step = 0
            while f"{step}/{next(iter(parameters))}" in arrays:
                feed = {placeholders[name]: arrays[f"{step}/{name}"] for name in parameters}
                session.run(train_op, feed)
                session.run(lowering.copy_slices_to_masters())
                values = session.run(masters)
                results |= {f"{step}/{name}": x for name, x in values.items()}
                step += 1
    return results


def run_schedule(binding: str, total: int, steps: list[int]):
    """Learning rates of the given steps, as utils.run makes them of gin's value."""
    import functools

    import numpy as np
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import learning_rate_schedules, utils

    import gin

    gin.clear_config()
    gin.parse_config(binding)
    schedule = gin.get_bindings(f"{utils.__name__}.run")["learning_rate_schedule"]
    if isinstance(schedule, list):
        schedule = functools.partial(
            learning_rate_schedules.product_learning_rate, factors=schedule
        )
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.int64, [])
        rate = tf.convert_to_tensor(schedule(step=step, total_train_steps=total))
        return np.array([session.run(rate, {step: s}) for s in steps])


if __name__ == "__main__":
    main()
