"""What a rank evaluation refuses before it computes, or at a wrong score."""

import dataclasses
import json

import numpy as np
import pytest
import seqio

from t0repro.errors import UserError
from t0repro.tasks.registry import add_cache_dirs, tasks_of_mixture

from ..tasks.prompt_caches import make
from .rank_evaluations import MIXTURE, SETTINGS, evaluate
from .small_model import save_model

pytestmark = [pytest.mark.always, pytest.mark.usefixtures("prompts")]


@pytest.mark.parametrize("harm", ["removed", "emptied", "of another vocabulary"])
def test_a_damaged_cache_of_prompted_tasks_is_refused_before_anything_is_scored(
    model_dir, prompts, tmp_path, monkeypatch, harm
):
    name = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
    make(tmp_path / "cache", name, min_shards=2)
    folder = tmp_path / "cache" / name
    monkeypatch.setattr(seqio.TaskRegistry.get(name), "_cache_dir", str(folder))
    cached = dataclasses.replace(SETTINGS, use_cached=True)
    assert evaluate(model_dir, tmp_path / "whole", cached, name).pairs == 6
    shard = sorted(folder.glob("validation.tfrecord-*"))[1]
    if harm == "removed":
        shard.unlink()
    elif harm == "emptied":
        shard.write_bytes(b"")
    else:
        path = folder / "provenance.json"
        digest = json.loads(path.read_text())["vocabulary"]["sha256"]
        path.write_text(path.read_text().replace(digest, "0" * 64))
    with pytest.raises(UserError, match="is incomplete|cached with another vocabulary"):
        evaluate(model_dir, tmp_path / "out", cached, name)
    assert not (tmp_path / "out").exists()


def test_tasks_that_are_not_cached_are_named(model_dir, prompts, tmp_path):
    with pytest.raises(
        UserError, match=rf"of {MIXTURE!r} are not cached \(. of .\): demo_"
    ) as error:
        evaluate(model_dir, tmp_path / "out", dataclasses.replace(SETTINGS, use_cached=True))
    assert "or, for rank-eval, no --cache_dir" in error.value.fix
    name = next(iter(tasks_of_mixture(MIXTURE)))
    (tmp_path / "cache" / name / "deeper").mkdir(parents=True)
    add_cache_dirs([tmp_path / "cache" / name], "--cache_dir")
    with pytest.raises(UserError) as error:
        evaluate(model_dir, tmp_path / "out", dataclasses.replace(SETTINGS, use_cached=True))
    assert error.value.fix == f"Name the folder above: {tmp_path / 'cache'}."


def test_a_nan_score_stops_the_run_naming_task_example_and_step(prompts, tmp_path):
    def spoil(tree):
        tree["target/decoder/decoder_norm/scale"][:] = np.nan

    model_dir = save_model(tmp_path / "model", step=9, spoil=spoil)
    with pytest.raises(UserError, match=r"demo_\w+_score_eval: the score of example \d+ at step 9"):
        evaluate(model_dir, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*_predictions"))


def test_a_checkpoint_of_another_vocabulary_is_refused(prompts, tmp_path):
    model_dir = save_model(tmp_path, vocabulary=256)
    with pytest.raises(UserError, match="has 1,408 pieces, the model's embedding 256 rows"):
        evaluate(model_dir, tmp_path / "out")


def test_a_task_without_answer_choices_is_refused(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="have no answer choices to rank: demo_") as error:
        evaluate(model_dir, tmp_path, mixture="demo_train")
    assert error.value.fix.startswith("Evaluate demo_eval_score_eval, demo_synthetic_ag_news")


def test_a_split_that_is_not_there_is_refused(model_dir, prompts, tmp_path):
    settings = dataclasses.replace(SETTINGS, split="test")
    with pytest.raises(UserError, match=r"has a split 'test'"):
        evaluate(model_dir, tmp_path, settings)


def test_a_split_without_examples_is_refused_and_one_among_others_is_named(
    model_dir, prompts, tmp_path
):
    import seqio

    from t0repro.tasks.registration import add_prompted_task

    rows = tmp_path / "data/super_glue/copa"
    rows.mkdir(parents=True)
    row = {"premise": "It rained.", "choice1": "Dry.", "choice2": "Wet.", "idx": 0, "label": 1}
    # The prompt is for causes, and leaves out the one row.
    (rows / "validation.jsonl").write_text(json.dumps(row | {"question": "effect"}) + "\n")
    task = add_prompted_task(
        "super_glue",
        "copa",
        "…why? C1 or C2",
        ["validation"],
        root=tmp_path / "data",
        vocabulary=seqio.get_mixture_or_task(MIXTURE).output_features["targets"].vocabulary,
        name="copa_without_rows",
    )
    empty = task.twin().name
    with pytest.raises(UserError, match=rf"The split 'validation' of '{empty}' has no examples"):
        evaluate(model_dir, tmp_path / "out", mixture=empty)
    other = "demo_synthetic_ag_news_which_section_choices_score_eval"
    seqio.MixtureRegistry.add("with_an_empty_task", [empty, other], default_rate=1)
    outcome = evaluate(model_dir, tmp_path / "out", mixture="with_an_empty_task")
    assert outcome.empty == (empty,) and outcome.scored


def test_tasks_without_rows_here_are_an_error_or_left_out_and_named(model_dir, prompts, tmp_path):
    import seqio

    from t0repro.tasks.registration import add_prompted_task

    task = add_prompted_task(
        "super_glue",
        "copa",
        "best_option",
        ["validation"],
        root=tmp_path,
        vocabulary=seqio.get_mixture_or_task(MIXTURE).output_features["targets"].vocabulary,
        name="copa_of_nowhere",
    )
    absent, other = task.twin().name, "demo_synthetic_ag_news_which_section_choices_score_eval"
    seqio.MixtureRegistry.add("with_a_task_without_rows", [absent, other], default_rate=1)
    with pytest.raises(UserError, match="copa") as caught:
        evaluate(model_dir, tmp_path / "out", mixture="with_a_task_without_rows")
    # Before anything is computed or written.
    assert "by --skip_missing" in str(caught.value.fix) and not (tmp_path / "out").exists()
    settings, said = dataclasses.replace(SETTINGS, skip_missing=True), []
    mixture = "with_a_task_without_rows"
    outcome = evaluate(model_dir, tmp_path / "out", settings, mixture, said)
    assert outcome.tasks == (other,)
    assert said[0] == f"Left out: 1 task ({absent}): rows not available."
    with pytest.raises(UserError, match="No task of .* has rows of split"):
        evaluate(model_dir, tmp_path / "out", settings, absent)


def test_a_mixture_that_is_not_registered_is_a_users_error(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="There is no mixture or task 'demo_eval'"):
        evaluate(model_dir, tmp_path, mixture="demo_eval")
    several = "demo_eval_score_eval,demo_train"
    with pytest.raises(UserError, match=f"'{several}' is several names.*at a time"):
        evaluate(model_dir, tmp_path, mixture=several)
    with pytest.raises(UserError, match=f"'{several}' is several names.*at a time"):
        tasks_of_mixture(several)
