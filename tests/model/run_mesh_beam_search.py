"""Runs Mesh TensorFlow's own beam search on tables of logits.

A script for a process of its own: Mesh TensorFlow wants graph mode.

    python run_mesh_beam_search.py searches.npz options.json found.npz

A table is float32 [batch, position, last token, vocabulary]. The options of each search name
`beams`, `alpha`, `prefilter`, `steps`, and `parts`, into which the layout divides the vocabulary.
Of search i come "<i>/tokens" [batch, beams, length] and "<i>/scores" [batch, beams].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from t0repro import compat

    compat.install()
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tables, options, out = sys.argv[1:]
    results = {}
    with np.load(tables) as given:
        for number, search in enumerate(json.loads(Path(options).read_text())):
            found = searched(given[str(number)], **search)
            results |= {f"{number}/{name}": x for name, x in found.items()}
    np.savez(out, **results)


def searched(table, *, beams: int, alpha: float, prefilter: int, parts: int, steps: int) -> dict:
    """The beams that the search returns, best first."""
    import mesh_tensorflow as mtf
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.beam_search import beam_search

    with tf.Graph().as_default():
        mesh = mtf.Mesh(graph := mtf.Graph(), "mesh")
        names = ("batch", "length", "last", "vocab")
        batch, length, last, vocab = map(mtf.Dimension, names, table.shape)
        beam = mtf.Dimension("beam", beams)
        placeholder = tf.placeholder(tf.float32, table.shape)
        dims = mtf.Shape([batch, length, last, vocab])
        logits = mtf.import_fully_replicated(mesh, placeholder, dims, name="logits")

        def of_position(position, ids, states):
            before = mtf.one_hot(position - 1, length, dtype=tf.int32)
            tokens = mtf.reduce_sum(ids * before, reduced_dim=length)
            here = mtf.one_hot(position, length, dtype=tf.float32)
            rows = mtf.einsum([logits, here], output_shape=[batch, last, vocab])
            chosen = mtf.one_hot(tokens, last, dtype=tf.float32)
            return mtf.einsum([rows, chosen], output_shape=[batch, beam, vocab]), states

        outputs = beam_search(
            of_position,
            mtf.zeros(mesh, mtf.Shape([batch, beam, length]), tf.int32),
            alpha,
            states=[],
            decode_length=mtf.constant(mesh, steps, dtype=tf.int32),
            layout=mtf.convert_to_layout_rules("vocab:model"),
            mesh_shape=mtf.Shape([mtf.Dimension("model", parts)]),
            num_prefilter=prefilter,
        )
        one = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), [], [""])
        lowering = mtf.Lowering(graph, {mesh: one}, autostack=False)
        tokens, scores = map(lowering.export_to_tf_tensor, outputs)
        with tf.Session() as session:
            tokens, scores = session.run([tokens, scores], {placeholder: table})
    return {"tokens": tokens, "scores": scores}


if __name__ == "__main__":
    main()
