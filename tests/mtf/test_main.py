"""t5_mesh_transformer --backend=mtf: every mode on CPU, and what bad input does."""

import json
import math
import re
import shlex
import shutil
import struct
from pathlib import Path

import mesh_commands as commands
import pytest

from ..helpers.own_lines import foreign_lines

pytestmark = [pytest.mark.mtf, pytest.mark.always]


def read_metrics(model_dir: Path) -> list[dict]:
    text = (model_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def model_dir(trained, tmp_path) -> Path:
    """A copy of the trained model_dir, to evaluate or to spoil."""
    return shutil.copytree(trained[0], tmp_path / "model")


# ---- Modes --------------------------------------------------------------------------------------


def test_training_writes_checkpoints_and_one_metrics_line_per_step(trained):
    model_dir, _ = trained
    lines = read_metrics(model_dir)
    assert [(line["split"], line["step"]) for line in lines] == [("train", n) for n in (1, 2, 3, 4)]
    assert all(
        struct.unpack("f", struct.pack("f", line["loss"]))[0] == line["loss"] for line in lines
    )
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert (model_dir / "model.ckpt-4.index").exists()
    assert (model_dir / "operative_config.gin").exists()
    assert (model_dir / "commands" / "command").exists()


def test_training_shows_step_loss_rates_and_time_left_and_nothing_of_the_libraries(trained):
    _, stderr = trained
    last = stderr.splitlines()[-1]
    for part in ("step 4 of 4", " per target token", "examples/s", "target tokens/s", "left"):
        assert part in last
    assert foreign_lines(stderr) == []


def test_training_goes_on_from_the_latest_checkpoint_and_repeats_no_line(model_dir, server):
    for path in model_dir.glob("model.ckpt-4.*"):
        path.unlink()
    (model_dir / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-2"\n')
    code, stderr = server.run(
        [f"--model_dir={model_dir}", *commands.TRAIN, "--gin_param=run.train_steps = 5"]
    )
    assert code == 0, stderr
    assert [line["step"] for line in read_metrics(model_dir)] == [1, 2, 3, 4, 5]


def test_score_eval_writes_scores_of_every_choice_and_rank_metrics(model_dir, server, tmp_path):
    scores = tmp_path / "scored"
    code, stderr = server.run(
        commands.evaluate(
            model_dir,
            "score_eval",
            "tiny_eval",
            f"--gin_param=save_scores.scores_filename = '{scores}'",
        )
    )
    assert code == 0, stderr
    values = [float(line) for line in Path(f"{scores}.scores").read_text().splitlines()]
    assert len(values) == 5 * 4
    assert all(value < 0 for value in values)
    assert Path(f"{scores}.targets").read_text().splitlines()[:4] == [
        "red",
        "green",
        "blue",
        "white",
    ]
    predictions = model_dir / "validation_eval" / "tiny_generate_score_eval_4_predictions"
    assert len(predictions.read_text().splitlines()) == 20
    line = read_metrics(model_dir)[-1]
    assert (line["split"], line["step"]) == ("validation", 4)
    assert line["task"] == "tiny_generate_score_eval"
    assert line["accuracy"] in (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)


def test_score_eval_needs_the_patch_that_keeps_ids(model_dir, server):
    code, stderr = server.run(
        commands.evaluate(model_dir, "score_eval", "tiny_eval"), unpatched="get_estimator"
    )
    assert code == 1
    assert "'bytes' object has no attribute 'tolist'" in stderr


def test_eval_decodes_and_writes_metrics(model_dir, server):
    code, stderr = server.run(commands.evaluate(model_dir, "eval", "tiny_train"))
    assert code == 0, stderr
    line = read_metrics(model_dir)[-1]
    assert (line["split"], line["step"], line["task"]) == ("validation", 4, "tiny_generate")
    assert 0 <= line["accuracy"] <= 100
    predictions = model_dir / "validation_eval" / "tiny_generate_4_predictions"
    assert len(predictions.read_text().splitlines()) == 5


def test_perplexity_eval_writes_metrics(model_dir, server):
    code, stderr = server.run(
        commands.evaluate(
            model_dir, "perplexity_eval", "tiny_train", "--gin_param=run.perplexity_eval_steps = 1"
        )
    )
    assert code == 0, stderr
    line = read_metrics(model_dir)[-1]
    assert (line["split"], line["step"], line["task"]) == ("validation", 4, "tiny_generate")
    assert line["neg_log_perplexity"] < 0


def _infer(model_dir: Path, output: Path) -> list[str]:
    questions = output.with_name("questions.txt")
    questions.write_text("the house is red . which colour ?\nthe car is blue . which colour ?\n")
    return commands.evaluate(
        model_dir, "infer", "tiny_train",
        "--gin_param=infer_checkpoint_step = 4",
        f"--gin_param=input_filename = '{questions}'",
        f"--gin_param=output_filename = '{output}'",
    )  # fmt: skip


def test_infer_writes_text(model_dir, server, tmp_path):
    code, stderr = server.run(_infer(model_dir, tmp_path / "answers"))
    assert code == 0 and foreign_lines(stderr) == [], stderr
    lines = (tmp_path / "answers-4").read_text().splitlines()
    assert len(lines) == 2
    assert not any(line.startswith(("b'", 'b"')) for line in lines)


def test_infer_needs_the_patch_that_decodes_to_text(model_dir, server, tmp_path):
    code, stderr = server.run(_infer(model_dir, tmp_path / "answers"), unpatched="decode")
    assert code == 0, stderr
    lines = (tmp_path / "answers-4").read_text().splitlines()
    assert all(line.startswith(("b'", 'b"')) for line in lines)


# ---- Bad input ----------------------------------------------------------------------------------


def _train_with(model_dir: Path, *flags: str) -> list[str]:
    return [f"--model_dir={model_dir}", *commands.TRAIN, *flags]


@pytest.fixture(scope="session")
def failures(trained, server, tmp_path_factory) -> dict[str, tuple[int, str, bool]]:
    """Case -> (exit code, stderr, whether model_dir was left as it was)."""
    root = tmp_path_factory.mktemp("failures")
    spoiled = {name: root / name for name in ("no_shard", "cut", "other_vocabulary")}
    for path in spoiled.values():
        shutil.copytree(trained[0], path)
    (spoiled["no_shard"] / "model.ckpt-4.data-00001-of-00002").unlink()
    shards = sorted(
        spoiled["cut"].glob("model.ckpt-4.data-*"), key=lambda path: path.stat().st_size
    )
    shards[-1].write_bytes(shards[-1].read_bytes()[:-100])
    lines = {
        "typo": _train_with(root / "new", "--gin_param=run.train_stepz = 3"),
        "unknown configurable": _train_with(root / "new", "--gin_param=runn.train_steps = 3"),
        "syntax": _train_with(root / "new", "--gin_param=run.train_steps = 'three"),
        "missing gin file": _train_with(root / "new", "--gin_file=no_such.gin"),
        "undefined macro": _train_with(root / "new", "--gin_param=run.train_steps = %NONE"),
        "missing module": _train_with(root / "new", "--module_import=no_such_module"),
        "unknown mixture": _train_with(root / "new", "--gin_param=MIXTURE_NAME = 'tiny_trian'"),
        "not cached": _train_with(
            root / "new",
            "--gin_param=mesh_train_dataset_fn.use_cached = True",
            f"--additional_task_cache_dirs={root / 'cache'}",
        ),
        "missing rows": _train_with(root / "new", "--gin_param=MIXTURE_NAME = 'tiny_missing_rows'"),
        "missing vocabulary": _train_with(root / "new", "--vocab=no_such.model"),
        "unknown flag": _train_with(root / "new", "--save_checkpoints_steps=1"),
        "stray argument": _train_with(root / "new", "run.train_steps=3"),
        "no checkpoint": _train_with(root / "new", "--gin_file=score_eval.gin"),
        "no initial checkpoint": _train_with(
            root / "new", "--gin_param=run.init_checkpoint = 'no/model.ckpt-1'"
        ),
        "no shard": commands.evaluate(spoiled["no_shard"], "score_eval", "tiny_eval"),
        "cut": commands.evaluate(spoiled["cut"], "score_eval", "tiny_eval"),
        "other vocabulary": commands.evaluate(
            spoiled["other_vocabulary"], "score_eval", "tiny_bytes"
        ),
        "other vocabulary, training": _train_with(
            spoiled["other_vocabulary"], "--gin_param=MIXTURE_NAME = 'tiny_bytes'"
        ),
    }
    before = _listing(root)
    results = {case: server.run(flags) for case, flags in lines.items()}
    unchanged = _listing(root) == before
    return {case: (*result, unchanged) for case, result in results.items()}


def _listing(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_size) for path in root.rglob("*"))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "typo",
            [
                "have a parameter named 'train_stepz'",
                "line",
                "run.train_stepz = 3",
                "'train_steps'",
            ],
        ),
        ("unknown configurable", ["No configurable matching 'runn'"]),
        ("syntax", ["the command line: ", "'three"]),
        ("missing gin file", ["no_such.gin", "--gin_file", "Searched: "]),
        ("undefined macro", ["NONE", "--gin_param 'run.train_steps = %NONE'"]),
        ("missing module", ["no_such_module", "--module_import"]),
        ("unknown mixture", ["'tiny_trian'", "'tiny_train'"]),
        ("not cached", ["tiny_generate", "/cache", "seqio_cache_tasks --tasks='tiny_generate'"]),
        ("missing rows", ["super_glue/rte", "train.jsonl", "one JSON object per line"]),
        ("missing vocabulary", ["no_such.model", "--vocab"]),
        ("unknown flag", ["save_checkpoints_steps", "gin's", "run.save_checkpoints_steps"]),
        ("stray argument", ["run.train_steps=3"]),
        ("no checkpoint", ["No checkpoint to evaluate", "Train first"]),
        ("no initial checkpoint", ["no/model.ckpt-1"]),
        ("no shard", ["model.ckpt-4.data-00001-of-00002", "Copy"]),
        ("cut", ["bytes, but the index calls for", "Copy"]),
        ("other vocabulary", ["128 rows", "padded to 384", "--vocab"]),
        ("other vocabulary, training", ["128 rows", "padded to 384"]),
    ],
)
def test_bad_input_ends_with_a_message_and_exit_code_2(failures, case, parts):
    code, text, _ = failures[case]
    assert code == 2
    assert "Traceback" not in text
    for part in parts:
        assert part in text


def test_bad_input_leaves_nothing_behind(failures):
    assert all(unchanged for _, _, unchanged in failures.values())


def test_a_bad_parameter_on_the_real_command_line_prints_little_but_the_message(env, tmp_path):
    ended = commands.run_command(_train_with(tmp_path / "new", "--gin_param=a.b = 1"), env)
    assert ended.returncode == 2
    first, *message = ended.stderr.splitlines()
    assert first.startswith("importing ") and len(message) == 3
    assert message[0].startswith("t5_mesh_transformer: No configurable matching 'a'.")
    assert not (tmp_path / "new").exists()


def test_help_is_no_mistake(server):
    assert server.run(["--help"])[0] == 0
    assert server.run(["--helpful"])[0] == 2
    assert server.run(["--helpfull"])[0] == 0


def test_help_fits_80_columns_and_has_every_flag_under_a_heading(server):
    _, text = server.run(["--help"])
    page = text.partition("Usage:")[2]
    assert max(map(len, page.splitlines())) <= 80
    headings = re.findall(r"^(\w.*):$", page, re.M)
    assert headings[:3] == ["Gin files", "Tasks", "The run"] and len(headings) == 7
    by_absl = set(re.findall(r"^  --(?:\[no\])?(\w+)", _flags_of_t5(server), re.M))
    assert by_absl <= set(re.findall(r"^  --(?:\[no\])?(\w+)", page, re.M))
    assert "repeat this option" not in page


def _flags_of_t5(server) -> str:
    """What absl lists of the flags of t5's command and of Mesh TensorFlow's utils."""
    _, text = server.run(["--helpfull"])
    return "\n".join(re.findall(
        r"^(?:t5\.models\.mesh_transformer_main|mesh_tensorflow\.transformer\.utils):\n(.*?)\n\n",
        text, re.M | re.S,
    ))  # fmt: skip


def test_the_example_of_help_can_be_pasted(server):
    _, text = server.run(["--help"])
    example = text.partition("Example:\n")[2].partition("\n\n")[0]
    program, *words = shlex.split(example.replace("\\\n", " "))
    assert program == "t5_mesh_transformer"
    # The run itself is the quick start's; here the words are parsed, and no more.
    code, said = server.run([*words, "--gin_param=run.no_such = 1"])
    assert code == 2 and "no_such" in said, said


def test_debug_shows_the_traceback(server, tmp_path):
    code, stderr = server.run(_train_with(tmp_path / "new", "--gin_param=a.b = 1", "--debug"))
    assert code == 1
    assert "Traceback" in stderr


def test_a_user_error_inside_the_data_pipeline_reaches_the_user(server, tmp_path):
    flags = _train_with(tmp_path / "new", "--gin_param=MIXTURE_NAME = 'tiny_broken_rows'")
    code, stderr = server.run(flags)
    assert code == 2, stderr
    assert stderr.splitlines()[-3:] == [
        "t5_mesh_transformer: Row 3 is broken.",
        "  where: rows.jsonl:3",
        "  fix: Fix it.",
    ]
    assert "Traceback" not in stderr


def test_a_task_without_rows_is_no_training_that_succeeded(server, tmp_path):
    flags = _train_with(tmp_path / "new", "--gin_param=MIXTURE_NAME = 'tiny_empty'")
    code, stderr = server.run(flags)
    assert code == 2, stderr
    assert "t5_mesh_transformer: There are no batches to train on" in stderr
    # No address of a function in memory, which gin adds to errors.
    assert stderr.splitlines()[-1].startswith("  fix: Check that the task has rows")


def test_a_training_that_is_done_already_succeeds_without_a_batch(model_dir, server):
    code, stderr = server.run([f"--model_dir={model_dir}", *commands.TRAIN])
    assert code == 0, stderr
