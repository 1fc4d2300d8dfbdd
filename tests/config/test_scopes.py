"""In which of gin's scopes a parameter is read: Mesh TensorFlow is run, and asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.config.model import ModelConfig
from t0repro.config.mtf.arguments import DECODER_ONLY, TOWER_SCOPES, full_name, scopes_read
from t0repro.config.settings import arguments_of
from t0repro.errors import UserError

from .test_mtf_gin import load

pytestmark = pytest.mark.mtf

SCRIPT = Path(__file__).parents[1] / "model" / "mesh_variables.py"
MODEL = """\
include 'defaults.gin'
include 'models/t5.1.1.base.gin'
num_layers = 1
d_model = 16
d_ff = 24
num_heads = 2
d_kv = 8
utils.run.mesh_shape = []
"""
# Where the encoder and the decoder would read a binding, where neither does, and a misspelled one.
SCOPES = ("", "encoder/", "decoder/", "encodr/")


def observed(folder: Path, gins: dict[str, str], vocabulary: int = 128) -> dict:
    """What Mesh TensorFlow's configurables were called with while it built each model."""
    job = {
        "out": str(folder / "variables.json"), "vocabulary": vocabulary, "slots": True,
        "may_fail": True, "arguments": True,
        "gins": {name: f"{MODEL}{text}\n" for name, text in gins.items()},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"@{folder / 'job.json'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "variables.json").read_text())
    return found


def test_every_configurable_is_read_in_the_scopes_that_mesh_tensorflow_calls_it_in(tmp_path):
    types = ("bitransformer", "lm")
    gins = {name: f"run.model_type = '{name}'" for name in types}
    for model_type, found in observed(tmp_path, gins).items():
        calls, attributes = found["arguments"], found["attributes"]
        called: dict[str, set[str]] = {}
        for call in calls:
            # The selector has dots and no slash.
            scope, _, selector = call.rpartition("/")
            called.setdefault(selector, set()).add(scope)
        called.pop("gin.macro")
        assert called == {selector: set(scopes_read(selector, model_type)) for selector in called}
        if model_type == "bitransformer":
            assert set(TOWER_SCOPES) <= set(called)
            looked_at = {name.lstrip("_") for name in attributes["encoder"]}
            of_decoder = {name.lstrip("_") for name in attributes["decoder"]} - looked_at
            taken = calls["decoder/mesh_tensorflow.transformer.transformer.Unitransformer"]
            assert of_decoder & set(taken) == DECODER_ONLY


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("encodr/make_layer_stack.num_layers = 7", "'encoder'"),
        ("encoder/EncDecAttention.num_heads = 7", "'decoder'"),
        ("decoder/AdafactorOptimizer.beta1 = 0.9", "AdafactorOptimizer.beta1"),
        ("train/mesh_train_dataset_fn.seed = 3", "mesh_train_dataset_fn.seed"),
        ("encoder/sublayer_dropout.dropout_rate = 0.1", "sublayer_dropout.dropout_rate"),
        ("encoder/Unitransformer.z_loss = 0.1", "'decoder'"),
        # Mesh TensorFlow's own file binds it for the decoder.
        ("Unitransformer.label_smoothing = 0.1", "gin/defaults.gin"),
    ],
)
def test_a_binding_in_a_scope_where_nothing_reads_it_is_refused_with_the_right_scope(
    binding, words
):
    with pytest.raises(UserError, match="has no effect") as error:
        load(binding)
    assert binding in str(error.value.where)
    assert words in str(error.value.what) and "--backend=mtf" in str(error.value.fix)


def other(value) -> str:
    """A value, as gin writes it, that is not this one."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, tuple):
        return "('swish', 'linear')"
    if isinstance(value, str):
        return "'bias'"
    return {0.0: "0.25", None: "3.0"}.get(value, str((value or 0) * 2))


@pytest.mark.slow
def test_a_scoped_binding_changes_the_run_as_it_changes_mesh_tensorflow_or_is_refused(tmp_path):
    plain = load().model
    bindings = {}
    for field, setting in arguments_of(ModelConfig, "mtf").items():
        selector, argument = full_name(setting.configurable.rpartition("/")[2]), setting.argument
        if selector.startswith("t0repro") or argument in ("model_type", "encoder_name"):
            continue
        # Unbound, or bound to False, a run decides by itself whether to rematerialize.
        value = False if argument == "recompute_grads" else getattr(plain, field)
        for scope in SCOPES:
            text = f"{scope}{selector}.{argument} = {other(value)}"
            bindings[text] = (field, f"{selector}", argument)
    calls = observed(tmp_path, {text: text for text in bindings})
    for text, (field, selector, argument) in bindings.items():
        value = text.rpartition(" = ")[2]
        effective = [
            arguments[argument]
            for call, arguments in calls[text]["arguments"].items()
            if call.rpartition("/")[2] == selector and argument in arguments
        ]
        try:
            model = load(text).model
        except UserError as error:
            assert error.where, text
            continue
        # What passes has changed a call of Mesh TensorFlow's and our run, or neither.
        changed = getattr(model, field) != getattr(plain, field)
        if text.startswith("encoder/") and argument == "num_layers":
            changed = model.num_encoder_layers != plain.num_encoder_layers
        assert changed == (value.strip("'") in effective), text
