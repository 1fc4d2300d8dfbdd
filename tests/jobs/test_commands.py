"""What T5X's page on auxiliary jobs warns of is refused, or warned of, before anything starts."""

import pytest

from t0repro.errors import UserError
from t0repro.jobs.commands import JobSettings, add_skip_missing, check, drop_skip_missing
from t0repro.progress import heard_by

EVAL = "t5x/examples/t5/t5_1_1/examples/base_wmt14enfr_eval.gin"
TRAIN = "t5x/examples/t5/t5_1_1/examples/base_wmt14enfr_train.gin"
VALUES = {
    "MODEL_DIR": "d",
    "MIXTURE_OR_TASK_NAME": "m",
    "INITIAL_CHECKPOINT_PATH": "c",
    "TRAIN_STEPS": 10,
    "EVAL_OUTPUT_DIR": "o",
}


def settings(**changes) -> JobSettings:
    pages_own = {
        "mixtures": ("wmt14_enfr_v003",),
        "gin_file": EVAL,
        "train_gin_files": (TRAIN,),
        "replace_gin_file": True,
        "build_target": "//t5x:eval",
    }
    return JobSettings(**(pages_own | changes))


def test_the_pages_own_example_is_an_evaluation_with_its_macros_replaced():
    macros, warnings = check(settings())
    assert warnings == []
    assert settings().command(VALUES, macros) == (
        *("{python}", "-m", "t0repro.cli", "eval", f"--gin_file={EVAL}"),
        *("--gin_search_paths=.", "--gin.MIXTURE_OR_TASK_NAME='m'"),
        *("--gin.INITIAL_CHECKPOINT_PATH='c'", "--gin.EVAL_OUTPUT_DIR='o'"),
    )


def test_continuous_fine_tuning_trains_with_both_files():
    fine_tune = settings(
        gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt14enfr_finetune.gin",
        train_gin_files=("t5x/examples/t5/t5_1_1/examples/base_c4_pretrain.gin",),
        replace_gin_file=True,
        final_steps=200,
        build_target="train",
    )
    macros, _ = check(fine_tune)
    command = fine_tune.command(VALUES, macros)
    assert command[3] == "train" and "--gin.TRAIN_STEPS=10" in command
    assert "--gin.MODEL_DIR='d'" in command


@pytest.mark.parametrize(
    ("file", "target", "steps"), [("eval", "//t5x:eval", 0), ("finetune", "train", 60)]
)
def test_the_files_of_the_example_on_real_data_fit_their_jobs(file, target, steps):
    """scripts/auxiliary_jobs.sh runs them."""
    folder = "t5x/examples/t5/t5_1_1/examples"
    example = settings(
        gin_file=f"{folder}/topics_{file}.gin",
        train_gin_files=(f"{folder}/topics_train.gin",),
        final_steps=steps,
        build_target=target,
    )
    macros, warnings = check(example)
    assert warnings == [] and "INITIAL_CHECKPOINT_PATH" in macros


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"mixtures": ()}, "no mixtures", "Name at least one"),
        (
            {"replace_gin_file": False},
            "would read the training run's gin files",
            "--replace_gin_file",
        ),
        ({"final_steps": 100}, "takes no steps", "Give 0 for continuous evaluation"),
        ({"final_steps": -1}, "-1 is not a number of fine-tuning steps", "Give 0"),
        ({"gin_file": None}, "there is no gin file", "Name a gin file"),
        ({"build_target": "rank-eval --title 'x"}, "No closing quotation", "Close every quote"),
        ({"build_target": " "}, "command is empty", "Give eval, train"),
        ({"gin_bindings": ("NO_SUCH_MACRO = 1",)}, "Nothing reads", "Correct or remove"),
        ({"gin_bindings": ("DROPOUT_RAT = 1",)}, "DROPOUT_RAT", "DROPOUT_RATE"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(changes, what, fix):
    with pytest.raises(UserError) as refused:
        check(settings(**changes))
    assert what in str(refused.value) and fix in str(refused.value)


def own_file(tmp_path, *lines: str) -> str:
    text = "\n".join(
        [
            "from __gin__ import dynamic_registration",
            "import seqio",
            "include 't5x/examples/t5/t5_1_1/tiny.gin'",
            "include 't5x/configs/runs/eval.gin'",
            "DROPOUT_RATE = 0.0",
            *lines,
        ]
    )
    (tmp_path / "my_eval.gin").write_text(text)
    return str(tmp_path / "my_eval.gin")


def test_checkpoint_path_in_place_of_initial_checkpoint_path_is_named(tmp_path):
    with pytest.raises(UserError) as refused:
        check(settings(gin_file=own_file(tmp_path)))
    assert "they read CHECKPOINT_PATH" in str(refused.value)
    assert "CHECKPOINT_PATH = %INITIAL_CHECKPOINT_PATH" in str(refused.value)
    check(settings(gin_file=own_file(tmp_path, "CHECKPOINT_PATH = %INITIAL_CHECKPOINT_PATH")))


def test_an_evaluator_without_tensorboard_is_warned_of(tmp_path):
    file = own_file(
        tmp_path,
        "CHECKPOINT_PATH = %INITIAL_CHECKPOINT_PATH",
        "seqio.Evaluator.logger_cls = [@seqio.JSONLogger]",
    )
    _, warnings = check(settings(gin_file=file))
    assert len(warnings) == 1 and "logs nothing to TensorBoard" in warnings[0]


def test_any_command_gets_the_values_where_it_names_them_or_after_it():
    named = settings(build_target="my-eval {INITIAL_CHECKPOINT_PATH} --to={EVAL_OUTPUT_DIR}")
    assert named.command(VALUES, check(named)[0]) == ("my-eval", "c", "--to=o")
    plain = settings(build_target="my-eval --fast")
    assert plain.command(VALUES, check(plain)[0]) == (
        *("my-eval", "--fast", "--model_dir=d", "--mixture_or_task_name=m"),
        *("--initial_checkpoint_path=c", "--train_steps=10", "--eval_output_dir=o"),
    )
    ranks = settings(build_target="rank-eval --limit 5")
    assert ranks.command(VALUES, check(ranks)[0])[3:] == (
        *(
            "rank-eval",
            "--checkpoint",
            "c",
            "--mixture",
            "m",
            "--out",
            "o",
            "--add_step",
            "--limit",
            "5",
        ),
    )


def test_the_jobs_gin_files_may_import_what_the_training_runs_may(tmp_path):
    file = tmp_path / "job.gin"
    file.write_text("import no_such_module\n")
    settings = JobSettings(("m",), str(file), build_target="train", import_allowlist=("mine",))
    assert "--gin_import_allowlist=mine" in settings.command({}, frozenset())
    with pytest.raises(UserError, match="'no_such_module', which --gin_import_allowlist does not"):
        check(settings)


def test_skip_missing_is_handed_on_to_jobs_of_this_projects_own():
    for target in ("eval", "//t5x:eval", "train", "rank-eval --module_import my.tasks"):
        for given in (target, f"{target} --skip_missing", f"{target} --skip-missing"):
            assert add_skip_missing(given) == f"{target} --skip_missing"
            assert drop_skip_missing(given) == target
    said: list[str] = []
    for target in ("", "bash eval.sh --skip_missing", "'"):
        with heard_by(said.append):
            assert add_skip_missing(target) == drop_skip_missing(target) == target
    assert len(said) == 3 and "not handed on to the jobs' own command, 'bash eval.sh" in said[1]
