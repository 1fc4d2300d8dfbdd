"""Decodes real inputs with Mesh TensorFlow's own Bitransformer.decode, or as its infer mode an lm.

A script for a process of its own: python run_mesh_decode.py '{"module": ..., "task": ..., ...}'

The job names a `module` to import and a `task` of it, how many `inputs` to take, the `bindings` of
the model and its `model_type`, if that is lm, a list of `runs` (arguments of Bitransformer.decode;
for an lm, the `targets` that there is room for), the `batch_size`, whether the variables are
rounded to float16 (`half`), and `out`, which gets `inputs` [inputs, length], `variables/<name>`,
`outputs/<run>` [inputs, length], cleaned, and `scores/<run>` [inputs, beams] of a beam search.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

INPUTS_LENGTH = 48


def main() -> None:
    from t0repro import compat

    compat.install()
    import mesh_tensorflow.transformer.utils as utils
    import numpy as np
    import t5.models

    import gin

    job = json.loads(sys.argv[1])
    importlib.import_module(job["module"])
    inputs, vocab_size = read_inputs(job["task"], job["inputs"])
    for module in (t5.models, utils):
        gin.add_config_file_search_path(os.path.join(os.path.dirname(module.__file__), "gin"))
    gin.parse_config(job["bindings"])
    results = {"inputs": inputs}
    if job.get("half"):
        results |= halved(decode(job, inputs, vocab_size, job["runs"][0], {}, 0))
    for number, options in enumerate(job["runs"]):
        variables = {k: x for k, x in results.items() if k.startswith("variables/")}
        results |= decode(job, inputs, vocab_size, options, variables, number)
    np.savez(job["out"], **results)


def read_inputs(name: str, count: int):
    """Token ids of the first inputs of a task or mixture, and its vocabulary's size."""
    import numpy as np
    import seqio

    provider = seqio.get_mixture_or_task(name)
    dataset = provider.get_dataset(
        {"inputs": INPUTS_LENGTH, "targets": 16}, "train", shuffle=False, use_cached=False
    )
    table = np.zeros((count, INPUTS_LENGTH), np.int32)
    for row, example in zip(table, dataset.take(count).as_numpy_iterator(), strict=True):
        row[: len(example["inputs"])] = example["inputs"]
    return table, provider.output_features["inputs"].vocabulary.vocab_size


def loud(name: str, value):
    """A random variable, scaled so that outputs vary with inputs and EOS comes now and then."""
    if value.ndim < 2:
        return value
    value = value * 2.5
    if name == "decoder/logits/kernel":
        value[:, 1] *= 4.0
    elif name == "transformer/embedding":  # of which an lm's logits are made
        value[1] *= 4.0
    return value


def halved(results: dict) -> dict:
    """The variables among some results, rounded to float16."""
    import numpy as np

    return {
        name: x.astype(np.float16).astype(np.float32)
        for name, x in results.items()
        if name.startswith("variables/")
    }


def decode(job, inputs, vocab_size, options, variables, number) -> dict:
    """The outputs of one run; the variables too, where they are not given."""
    import mesh_tensorflow as mtf
    import mesh_tensorflow.transformer.utils as utils
    import numpy as np
    import tensorflow.compat.v1 as tf

    kind, batch_size = job.get("model_type", "bitransformer"), job["batch_size"]
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        model = utils.build_model(
            kind, vocab_size, vocab_size, mtf.convert_to_layout_rules([]), mtf.Shape([])
        )
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape(
            [mtf.Dimension("batch", batch_size), mtf.Dimension("length", inputs.shape[1])]
        )
        placeholder = tf.placeholder(tf.int32, shape.to_integer_list)
        source = mtf.import_fully_replicated(mesh, placeholder, shape, name="inputs")
        with noting_scores() as scores:
            dtype = utils.get_variable_dtype()
            if kind == "lm":
                # As utils.tpu_estimator_model_fn does in mode infer.
                source = mtf.pad(source, [0, options["targets"]], "length")
                outputs = model.sample_autoregressive(
                    source, variable_dtype=dtype, remove_partial_sequences=True
                )
            else:
                outputs = model.decode(source, variable_dtype=dtype, **options)
        outputs = {"outputs": outputs} | ({"scores": scores[0]} if scores else {})
        outputs = {name: mtf.anonymize(x) for name, x in outputs.items()}
        implementation = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), [], [""])
        lowering = mtf.Lowering(graph, {mesh: implementation}, autostack=False)
        exported = {name: lowering.export_to_tf_tensor(x) for name, x in outputs.items()}
        exported["outputs"] = utils.clean_decodes(exported["outputs"])
        restore = lowering.copy_masters_to_slices()
        names = {v.name for v in graph.all_variables}
        masters = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if not variables:
                found = session.run(masters)
                variables = {f"variables/{name}": loud(name, x) for name, x in found.items()}
            for name, variable in masters.items():
                variable.load(variables[f"variables/{name}"], session)
            session.run(restore)
            rows = [
                session.run(exported, {placeholder: inputs[start : start + batch_size]})
                for start in range(0, len(inputs), batch_size)
            ]
    found = {f"{name}/{number}": np.concatenate([row[name] for row in rows]) for name in exported}
    return variables | found


@contextlib.contextmanager
def noting_scores():
    """A list that gets the scores of each beam search, which Mesh TensorFlow drops."""
    import mesh_tensorflow as mtf

    original, scores = mtf.beam_search.beam_search, []

    def noting(*args, **kwargs):
        beams, found = original(*args, **kwargs)
        scores.append(found)
        return beams, found

    mtf.beam_search.beam_search = noting
    try:
        yield scores
    finally:
        mtf.beam_search.beam_search = original


if __name__ == "__main__":
    main()
