"""The logits of Mesh TensorFlow's own model, from a checkpoint that it restores itself.

    python mesh_logits.py PREFIX TOKENS.npz LOGITS.npy BINDINGS.gin

TOKENS.npz has `inputs` and `targets`, int32 [batch, length]; LOGITS.npy gets float32
[batch, length, vocabulary]. BINDINGS.gin is gin text that names the model and its sizes.
"""

from __future__ import annotations

import os
import sys

import numpy as np


def main() -> None:
    from t0repro import compat

    compat.install()
    import mesh_tensorflow as mtf
    import t5.models
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import utils

    import gin

    tf.disable_v2_behavior()
    prefix, tokens_file, logits_file, bindings_file = sys.argv[1:]
    for module in (t5.models, utils):
        gin.add_config_file_search_path(os.path.join(os.path.dirname(module.__file__), "gin"))
    with open(bindings_file) as file:
        gin.parse_config(file.read())
    with np.load(tokens_file) as arrays:
        tokens = {name: arrays[name].astype(np.int32) for name in ("inputs", "targets")}
    vocab_size = gin.query_parameter("%vocab_size")
    model = utils.build_model(
        model_type="bitransformer", input_vocab_size=vocab_size, output_vocab_size=vocab_size
    )
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch = mtf.Dimension("batch", len(tokens["inputs"]))
    imported = [
        mtf.import_tf_tensor(
            mesh, array, mtf.Shape([batch, mtf.Dimension("length", array.shape[1])])
        )
        for array in tokens.values()
    ]
    logits, _ = model.call_simple(
        *imported,
        compute_loss=False,
        mode=tf.estimator.ModeKeys.EVAL,
        variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.float32),
    )
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), mtf.LayoutRules([]), [""])
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    result = lowering.export_to_tf_tensor(logits)
    with tf.Session() as session:
        tf.train.Saver(tf.global_variables()).restore(session, prefix)
        session.run(lowering.copy_masters_to_slices())
        np.save(logits_file, session.run(result))


if __name__ == "__main__":
    main()
