"""Builds Mesh TensorFlow's graph of each model gin and writes its variables' names and shapes.

A script for a process of its own. No graph is lowered or run, so the largest model costs no memory.

    python mesh_variables.py '{"out": FILE, "vocabulary": N, "slots": BOOL, "gins": {NAME: TEXT}}'
    python mesh_variables.py @JOB.json

Writes JSON: {NAME: {"variables": {name: shape}, "slots": {name: shape}, "consulted": [...]}}, where
`consulted` has every configurable that was called while the training graph was built. With
"may_fail" in the job, a model that cannot be built gives {"error": TEXT} instead. With "arguments",
NAME also has {"arguments": {"scope/selector": {argument: value as text}}}: what each configurable
was called with, in which scope, as far as the graph was built; and "attributes", which of its own
each tower of an encoder-decoder model looks at while it computes.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    from t0repro import compat

    compat.install()
    import mesh_tensorflow.transformer.utils as utils
    import t5.models
    import tensorflow.compat.v1 as tf

    import gin

    tf.disable_v2_behavior()
    for module in (t5.models, utils):
        gin.add_config_file_search_path(os.path.join(os.path.dirname(module.__file__), "gin"))
    text = sys.argv[1]
    if text.startswith("@"):  # a file, as a long list is too much for a command line
        with open(text[1:]) as file:
            text = file.read()
    job = json.loads(text)
    results = {}
    for name, bindings in job["gins"].items():
        gin.clear_config()
        try:
            gin.parse_config(bindings)
            results[name] = variables_of(job["vocabulary"], job["slots"])
        except Exception as error:
            if not job.get("may_fail"):
                raise
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        if job.get("arguments"):
            results[name]["arguments"] = arguments_of_calls()
    with open(job["out"], "w") as file:
        json.dump(results, file)


def variables_of(vocabulary: int, with_slots: bool) -> dict:
    """Variables of the model that gin describes, in training, and its optimizer's slots."""
    import gin.config
    import mesh_tensorflow as mtf
    import mesh_tensorflow.transformer.utils as utils
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import transformer

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        run = gin.get_bindings(f"{utils.__name__}.run")
        model_type = run["model_type"]
        model = utils.build_model(
            model_type, vocabulary, vocabulary, mtf.convert_to_layout_rules([]), mtf.Shape([])
        )
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape([mtf.Dimension("batch", 2), mtf.Dimension("length", 8)])

        def feature(name):
            placeholder = tf.placeholder(tf.int32, [2, 8], name)
            return mtf.import_fully_replicated(mesh, placeholder, shape, name=name)

        targets, segments = feature("targets"), feature("segments")
        keywords: dict = {"compute_loss": True, "variable_dtype": utils.get_variable_dtype()}
        towers = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
        attributes = {name: noting_attributes(tower) for name, tower in towers.items() if tower}
        if model_type == "bitransformer":
            keywords |= {"encoder_sequence_id": segments, "decoder_sequence_id": segments}
            model.call_simple(feature("inputs"), targets, **keywords)
        else:
            inputs = transformer.autoregressive_inputs(targets, sequence_id=segments)
            model.call_simple(inputs, targets, sequence_id=segments, **keywords)
        variables = list(graph.trainable_variables)
        if with_slots:
            optimizer = run["optimizer"](learning_rate=0.1)
            # Any gradients will do for the slots' shapes.
            optimizer.apply_grads([v.value for v in variables], variables)
        shapes = {v.name: v.shape.to_integer_list for v in variables}
        slots = {v.name: v.shape.to_integer_list for v in graph.all_variables}
    consulted = sorted({selector for _, selector in gin.config._OPERATIVE_CONFIG})
    return {
        "variables": shapes,
        "slots": {name: size for name, size in slots.items() if name not in shapes},
        "consulted": consulted,
        "attributes": {name: sorted(found) for name, found in attributes.items()},
    }


def noting_attributes(tower) -> set:
    """A set that fills with the names of the attributes that are read of an object from now on."""
    found: set = set()

    class Noting(type(tower)):
        def __getattribute__(self, name):
            found.add(name)
            return super().__getattribute__(name)

    tower.__class__ = Noting
    return found


def arguments_of_calls() -> dict:
    """What every configurable was called with so far, by "scope/selector"."""
    import gin.config

    return {
        f"{scope}/{selector}": {name: str(value) for name, value in arguments.items()}
        for (scope, selector), arguments in gin.config._OPERATIVE_CONFIG.items()
    }


if __name__ == "__main__":
    main()
