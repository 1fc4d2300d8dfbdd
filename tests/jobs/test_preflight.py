"""What a job would refuse, its controller refuses before the first checkpoint."""

import pytest

from t0repro.cloud.auxiliary import (
    auxiliary_jobs_during_training,
    check_jobs,
    hand_on_skip_missing,
)
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.demo.datasets import VOCABULARY

from ..runs.tiny_gin import SIZES
from .test_t5x_jobs import EVAL, TASK
from .trainings import controller, save_checkpoints

NO_GIN = T5xInputs("train", (), (), (".",))


def evaluation(tmp_path, **changes) -> AuxiliaryOptions:
    (tmp_path / "my_eval.gin").write_text(EVAL + "\n".join(SIZES) + "\n")
    options = {
        "auxiliary_job_mixtures": TASK,
        "auxiliary_job_gin_file": str(tmp_path / "my_eval.gin"),
        "replace_gin_file": True,
    }
    return AuxiliaryOptions(**(options | changes))


def test_a_split_that_no_task_has_stops_the_training_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = evaluation(tmp_path)
    check_jobs(options, NO_GIN)
    gin = T5xInputs("train", (), ("MIXTURE_OR_TASK_SPLIT = 'test'",), (".",))
    with (
        pytest.raises(UserError) as refused,
        auxiliary_jobs_during_training(tmp_path / "model", options, gin),
    ):
        pytest.fail("the training started")
    message = str(refused.value)
    assert f"The jobs for {TASK} would fail. No task of '{TASK}' has a split 'test'." in message
    assert "where: MIXTURE_OR_TASK_SPLIT (utils.DatasetConfig.split)" in message
    assert "fix: Choose one of " in message and "Traceback" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["my_eval.gin"]


def test_a_mixture_with_nothing_here_gets_no_jobs_if_missing_rows_may_be_skipped(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    options = AuxiliaryOptions(
        auxiliary_job_mixtures="super_glue_rte_GPT_3_style_score_eval",
        auxiliary_job_build_target_path="rank-eval --module_import t0repro.tasks.t0",
    )
    with pytest.raises(UserError, match=r"would fail\. The rows of super_glue/rte"):
        check_jobs(options, NO_GIN)
    said: list[str] = []
    with (
        heard_by(said.append),
        auxiliary_jobs_during_training(tmp_path / "m", hand_on_skip_missing(options), NO_GIN),
    ):
        pass
    assert "super_glue_rte_GPT_3_style_score_eval are left out: No task" in said[0], said
    assert said[1].startswith("there are no auxiliary jobs") and not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"launcher": "nope"}, "There is no launcher nope"),
        ({"launcher": "vertex"}, "need a project, a location"),
        ({"auxiliary_job_build_target_path": "''"}, "command is empty"),
    ],
)
def test_what_the_controller_would_refuse_later_is_refused_now(tmp_path, changes, what):
    options = {"auxiliary_job_mixtures": TASK, "auxiliary_job_build_target_path": "true"}
    with pytest.raises(UserError, match=what):
        check_jobs(AuxiliaryOptions(**(options | changes)), NO_GIN)


@pytest.mark.slow
def test_a_rank_evaluations_options_mixture_and_split_are_checked_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "rank-eval --module_import t0repro.tasks.demo"

    def check(more: str, mixture: str = TASK) -> None:
        options = AuxiliaryOptions(
            auxiliary_job_mixtures=mixture, auxiliary_job_build_target_path=f"{command} {more}"
        )
        check_jobs(options, NO_GIN)

    check("--limit 3")
    for more, mixture, what in (
        ("--split nowhere", TASK, "has a split 'nowhere'(.|\n)*where: --split"),
        ("--limmit 3", TASK, "limmit"),
        ("", "no_such_task", "no_such_task(.|\n)*where: --auxiliary_job_mixtures"),
        ("", "no_such_task", "path='rank-eval .* --module_import MODULE'"),
    ):
        with pytest.raises(UserError, match=f"would fail. (.|\n)*{what}"):
            check(more, mixture)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "attempts"), [(2, 1), (1, 3), (75, 3)])
def test_a_job_that_ends_with_2_is_not_tried_again(tmp_path, code, attempts):
    save_checkpoints(tmp_path / "model", 3)
    said: list[str] = []
    command = ["sh", "-c", f"'exit {code}'"]
    with heard_by(said.append):
        assert not controller(tmp_path / "model", command).run(lambda: False)
    assert sum("started (" in line for line in said) == attempts
    why = "a mistake in its settings" if code == 2 else "3 failures"
    assert said[-2].endswith(f"given up after {why}") and said[-1] == "0 of 1 job succeeded"
