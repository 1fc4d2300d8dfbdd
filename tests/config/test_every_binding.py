"""No argument of a T5's configurables changes Mesh TensorFlow's model behind the JAX stack's back.

Every argument of every configurable that a T5 reaches is bound to other values, in every scope.
What the reader lets pass must give both stacks the same parameters, by name and shape.
"""

import json
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import jax
import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.mtf.refusals import known_bindings
from t0repro.config.mtf.stand_ins import signature_of
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters

pytestmark = pytest.mark.mtf

SCRIPT = Path(__file__).parents[1] / "model" / "mesh_variables.py"
TINY = (
    "num_layers = 1", "d_model = 16", "d_ff = 24", "num_heads = 2", "d_kv = 8",
    "utils.run.mesh_shape = []",
)  # fmt: skip
SCOPES = ("", "encoder/", "decoder/")


def inputs(param: str) -> MeshInputs:
    return MeshInputs(
        "a_model_dir",
        ("dataset.gin", "models/t5.1.1.base.gin"),
        ("MIXTURE_NAME = 'demo_train'", "run.batch_size = 2", *TINY, param),
        module_imports=("t0repro.tasks.demo",),
    )


def arguments(selector: str) -> dict:
    """Every argument that a configurable takes, with its default, those of its base included."""
    owners = [selector.replace("EncDecAttention", "SelfAttention"), selector]
    return {
        name: parameter.default
        for owner in owners
        for name, parameter in signature_of(owner).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name != "self"
    }


def other_values(default) -> list[str]:
    """Values, as gin writes them, that are not the default."""
    if isinstance(default, bool):
        return [str(not default)]
    if isinstance(default, int):
        return [str(default + 1), "3"]
    if isinstance(default, float):
        return ["0.37", "2.0"]
    if isinstance(default, str):
        return ["'other'"]
    return ["3", "True", "0.37", "'other'", "['other']"]


def bindings() -> list[str]:
    return [
        f"{scope}{selector}.{argument} = {value}"
        for selector in known_bindings()
        if ".transformer.transformer" in selector
        for argument, default in arguments(selector).items()
        for value in other_values(default)
        for scope in SCOPES
    ]


def accepted() -> dict[str, dict]:
    """Binding -> shapes of the JAX model by Mesh TensorFlow's names, if nothing refused it."""
    found = {}
    for param in bindings():
        try:
            config = dialect.load(inputs(param)).run
        except UserError:
            continue
        model = T5(config.model, config.dtypes)
        shapes = jax.eval_shape(lambda m=model: initial_parameters(m, jax.random.key(0)))
        names = config.model.mesh_variables()
        found[param] = {
            names[path]: list(array.shape)
            for path, array in flax.traverse_util.flatten_dict(shapes, sep="/").items()
        }
    return found


def mesh(folder: Path, params: list[str], vocabulary: int) -> dict:
    common = "\n".join(("include 'defaults.gin'", "include 'models/t5.1.1.base.gin'", *TINY))
    job = {
        "out": str(folder / "variables.json"),
        "vocabulary": vocabulary,
        "slots": False,
        "may_fail": True,
        "gins": {param: f"{common}\n{param}\n" for param in params},
    }
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"@{folder / 'job.json'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "variables.json").read_text())


@pytest.mark.slow
def test_what_passes_gives_both_stacks_the_same_parameters(tmp_path):
    ours = accepted()
    assert len(ours) > 20
    plain = dialect.load(inputs("run.train_steps = 1"))
    theirs = mesh(tmp_path, list(ours), plain.inputs.vocabularies[0].vocab_size)
    differing = {}
    for param, parameters in ours.items():
        found = theirs[param]
        if found.get("variables") != parameters:
            differing[param] = found.get("error") or "other variables"
    assert differing == {}


@pytest.mark.parametrize("argument", ["num_heads = 3", "key_value_size = 7"])
@pytest.mark.parametrize("scope", ["", "decoder/"])
def test_cross_attention_of_another_size_is_refused_with_its_place(scope, argument):
    param = f"{scope}EncDecAttention.{argument}"
    with pytest.raises(UserError, match=f"{argument[-1]} in EncDecAttention") as error:
        dialect.load(inputs(param)).run  # noqa: B018
    assert param in str(error.value.where)


def test_cross_attention_of_the_same_size_passes():
    assert dialect.load(inputs("EncDecAttention.num_heads = 2")).run.model.num_heads == 2
