"""Operative configs of released checkpoints load as t5_mesh_transformer loads them."""

import dataclasses

import pytest
from absl import flags

from t0repro.config.configuration import NotOnJax
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.errors import UserError

from . import operative_configs as files

pytestmark = pytest.mark.mtf
MIXTURE = "MIXTURE_NAME = 'demo_train'"


def inputs(tmp_path, text, skip_unknown=(), name="operative_config.gin"):
    (tmp_path / name).write_text(text)
    return MeshInputs(
        "a_model_dir",
        (str(tmp_path / name),),
        (MIXTURE, "run.train_steps = 20"),
        module_imports=("t0repro.tasks.demo",),
        skip_unknown=skip_unknown,
    )


def test_t5_1_0s_switches_mean_the_legacy_sublayers_with_their_rate_and_names(tmp_path):
    config = dialect.load(inputs(tmp_path, files.T5_1_0)).run
    model = config.model
    assert (model.d_model, model.d_ff, model.num_heads, model.d_kv) == (64, 96, 4, 16)
    assert model.dropout_rate == 0.1 and model.norm_names == "layer_norm"
    assert model.activations == ("relu",) and model.logits_from_embedding
    names = model.mesh_variables().values()
    assert "encoder/block_001/layer_000/layer_norm/scale" in names
    assert "decoder/final_layer_norm/scale" in names
    assert config.schedule is not None and config.schedule.arguments["linear_decay_fraction"] == 0.0
    assert config.train_steps == 20 and config.batch_size == 8


def test_t5_1_1s_sublayers_spelled_out_mean_todays(tmp_path):
    config = dialect.load(inputs(tmp_path, files.T5_1_1)).run
    assert config.model.norm_names == "rms_norm" and config.model.dropout_rate == 0.0
    assert config.model.activations == ("gelu", "linear")
    # Eight cores share a batch of 8 rows: one row each, which needs no microbatches.
    assert config.num_microbatches == 1
    assert config.dtypes.master == "bfloat16"
    assert "operative_config.gin" in config.provenance["model.d_ff"]


@pytest.mark.parametrize("text", [files.T5_1_0, files.T5_1_1], ids=["1.0", "1.1"])
@pytest.mark.parametrize("fork", [False, True], ids=["released", "of a fork"])
def test_gin_holds_the_same_after_t5s_own_command_has_parsed_it(tmp_path, monkeypatch, text, fork):
    """t5's main is run to the point where it calls utils.run, which both backends share."""
    from t0repro import compat

    compat.install()
    import mesh_tensorflow.transformer.utils as utils
    from t5.models import mesh_transformer_main

    import gin

    if fork:
        text += files.FORK.splitlines()[1] + "\n"
    ours = parse(inputs(tmp_path, text, skip_unknown=fork))
    mine = dict(gin.config._CONFIG)
    gin.clear_config()
    seen = {}
    monkeypatch.setattr(utils, "run", lambda **_: seen.update(gin.config._CONFIG))
    options = flags.FLAGS
    options(
        [
            "t5_mesh_transformer",
            f"--model_dir={tmp_path}",
            "--module_import=t0repro.tasks.demo",
            f"--gin_file={tmp_path / 'operative_config.gin'}",
            f"--gin_param={MIXTURE}",
            "--gin_param=run.train_steps = 20",
            "--skip_all_gin_unknowns"
            if fork
            else f"--additional_deprecated_gin_references={files.T5_1_0_DEPRECATED[0]}",
        ]
    )
    try:
        mesh_transformer_main.main([])
    finally:
        options.unparse_flags()
        gin.clear_config()
    dtypes = ("", "mesh_tensorflow.transformer.utils.get_variable_dtype")
    assert seen.pop(dtypes)["activation_dtype"] == "float32"  # main's own, without --tpu
    assert mine.pop(dtypes)["activation_dtype"] == "bfloat16"
    assert readable(seen) == readable(mine)
    assert ours.places


def readable(config):
    """A configuration to compare: vocabularies are rebuilt each time."""
    return {
        key: {name: repr(value) for name, value in values.items() if name != "vocabulary"}
        for key, values in config.items()
    }


def test_a_forks_names_fail_unless_they_are_given_as_deprecated_or_all_are_skipped(tmp_path):
    known = files.T5_1_1 + "our_own_loss.margin = 0.5\n"
    with pytest.raises(UserError, match="our_own_loss"):
        dialect.load(inputs(tmp_path, known))
    named = dialect.load(inputs(tmp_path, known, skip_unknown=("our_own_loss",))).run
    skipped = dialect.load(inputs(tmp_path, known, skip_unknown=True)).run
    plain = dialect.load(inputs(tmp_path, files.T5_1_1)).run
    assert named == skipped == plain


def test_an_unknown_argument_of_a_known_function_fails_even_then(tmp_path):
    """gin skips unknown functions, not unknown arguments; so does t5_mesh_transformer."""
    with pytest.raises(UserError, match="our_own_summary_steps"):
        dialect.load(inputs(tmp_path, files.T5_1_1 + files.FORK, skip_unknown=True))


@pytest.mark.parametrize("bound", ["'a/model.ckpt-1'", "'b/model.ckpt-1'", "None"])
def test_a_start_that_mesh_tensorflow_no_longer_reads_is_no_random_start(tmp_path, bound):
    """Today's get_estimator passes run.init_checkpoint, so gin never fills in the estimator's."""
    text = files.T5_1_1 + "\ntpu_estimator_model_fn.init_checkpoint = 'a/model.ckpt-1'"
    given = inputs(tmp_path, f"{text}\nrun.init_checkpoint = {bound}\n")
    if bound == "'a/model.ckpt-1'":
        start = dialect.load(given).run.plan.restore
        assert start is not None and start.path == "a/model.ckpt-1"
        return
    # Not a NotOnJax, which a run on Mesh TensorFlow would ignore.
    with pytest.raises(UserError, match="init_checkpoint is 'a/model.ckpt-1'") as error:
        dialect.load(given)
    assert not isinstance(error.value, NotOnJax)
    assert "operative_config.gin" in str(error.value.where)
    for remedy in ("run.init_checkpoint = 'a/model.ckpt-1'", "init_checkpoint = None"):
        assert remedy in str(error.value.fix)
        both = "tpu_estimator_model_fn." if remedy.endswith("None") else ""
        again = dataclasses.replace(given, gin_params=(*given.gin_params, both + remedy))
        dialect.load(again)
    # An evaluation reads its own checkpoints.
    scored = ("score_eval.gin", "run.dataset_split = 'validation'")
    dialect.load(
        dataclasses.replace(
            given,
            gin_files=(*given.gin_files, scored[0]),
            gin_params=(*given.gin_params, scored[1]),
        )
    )


def test_a_required_macro_is_missed_only_where_something_reads_it(tmp_path):
    text = files.T5_1_1.replace("dropout_rate = 0.0", "dropout_rate = %gin.REQUIRED")
    with pytest.raises(UserError, match="The macro dropout_rate has no value"):
        dialect.load(inputs(tmp_path, text))
    assert dialect.load(inputs(tmp_path, f"{files.T5_1_1}\nUNUSED = %gin.REQUIRED\n")).run
