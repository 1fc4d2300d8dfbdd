"""One update of Mesh TensorFlow's Adafactor on gradients of given shapes; its slots go to a file.

    python run_mesh_adafactor.py SLOTS.npz 128x128 128x256 ...

The file holds `gradient/<shape>` and `<slot>/<shape>`. At global step 0 the decay is 0, so that
each slot is the mean of the squared gradient.
"""

from __future__ import annotations

import sys

import numpy as np


def main() -> None:
    from t0repro import compat

    compat.install()
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow import optimize

    tf.disable_v2_behavior()
    file_name, *names = sys.argv[1:]
    generator = np.random.default_rng(0)
    gradients = {
        # Without the spread, the means of a square matrix's rows and columns would be much alike.
        name: generator.normal(size=shape) * np.exp(generator.normal(size=shape[:1] + (1,)))
        for name in names
        for shape in [tuple(map(int, name.split("x")))]
    }
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    imported = []
    for name, gradient in gradients.items():
        shape = mtf.Shape([mtf.Dimension(f"d{i}", n) for i, n in enumerate(gradient.shape)])
        mtf.get_variable(mesh, name, shape)
        imported.append(mtf.import_tf_tensor(mesh, tf.constant(gradient, tf.float32), shape))
    optimizer = optimize.AdafactorOptimizer(learning_rate=0.01)
    updates = optimizer.apply_grads(imported, graph.trainable_variables)
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), mtf.LayoutRules([]), [""])
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    operations = [lowering.lowered_operation(update) for update in updates]
    to_masters = lowering.copy_slices_to_masters()
    slots = {}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(operations)
        session.run(to_masters)
        for variable in tf.global_variables():
            name, _, slot = variable.op.name.partition("_slot_")
            if name in names and slot in ("vr", "vc", "v"):
                slots[f"{slot}/{name}"] = session.run(variable)
    gradients = {f"gradient/{name}": value for name, value in gradients.items()}
    np.savez(file_name, **gradients, **slots)


if __name__ == "__main__":
    main()
