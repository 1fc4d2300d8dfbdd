"""`t0repro cache` as people call it."""

import contextlib
import functools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import commands
from ..helpers.own_lines import foreign_lines

DEMO = "--module_import=t0repro.tasks.demo"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return commands.run("t0repro", "cache", *arguments, env={**os.environ, **environment})


def test_tasks_are_cached_once_and_the_second_call_has_nothing_to_do(tmp_path):
    arguments = (
        DEMO,
        "--tasks=demo_synthetic_glue_*,demo_synthetic_imdb_*",
        f"--output_cache_dir={tmp_path}",
    )
    first = run(*arguments, "--workers=2")
    assert first.returncode == 0, first.stderr
    assert "Cached 14 of 14 tasks in" in first.stdout
    assert foreign_lines(first.stderr) == []
    assert len(list(tmp_path.glob("*/COMPLETED"))) == 14
    second = run(*arguments)
    assert second.returncode == 0 and "has the 14 tasks already" in second.stdout


def test_a_users_own_prompts_are_cached(tmp_path):
    folder = tmp_path / "data" / "super_glue" / "rte"
    folder.mkdir(parents=True)
    row = {"premise": "It rained.", "hypothesis": "It was wet.", "label": 0, "idx": 0}
    (folder / "validation.jsonl").write_text(json.dumps(row) + "\n")
    prompts = tmp_path / "mine.yaml"
    prompts.write_text(
        "dataset: super_glue\nsubset: rte\ntemplates:\n  0c2b7cf0-0000-4000-8000-000000000001:"
        " !Template\n    name: mine\n    id: 0c2b7cf0-0000-4000-8000-000000000001\n"
        "    reference: ''\n    answer_choices: Yes ||| No\n"
        "    jinja: '{{premise}} So {{hypothesis}} ||| {{answer_choices[label]}}'\n"
        "    metadata: !TemplateMetadata\n      choices_in_prompt: false\n"
        "      metrics: [Accuracy]\n      original_task: true\n"
    )
    cache = functools.partial(
        run,
        f"--templates={prompts}",
        "--tasks=super_glue_rte_mine*",
        f"--output_cache_dir={tmp_path / 'cache'}",
        T0REPRO_DATA_DIR=str(tmp_path / "data"),
        T0REPRO_VOCAB=str(
            Path(__file__).resolve().parents[2] / "tasks" / "demo" / "sentencepiece.model"
        ),
    )
    done = cache()
    assert done.returncode == 0, done.stderr
    assert "Cached 2 of 2 tasks in" in done.stdout and ": 3 examples in" in done.stdout
    # Not whole: the split to train on is not here.
    again = cache()
    assert "Left out splits of 2 tasks" in again.stdout and "already" not in again.stdout


def run_on_terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code, and what a terminal shows."""
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "t0repro.cli", "cache", *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, **environment},
    ) as process:
        os.close(its)
        shown = b""
        # Linux ends a terminal that nobody holds any more by an error, not by an end of file.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


SEQIO_MODULE = """
import seqio
from t0repro.tasks.demo.datasets import FOLDER, VOCABULARY
from t0repro.tasks.registration import add_prompted_task

vocabulary = seqio.SentencePieceVocabulary(str(VOCABULARY), 100)
task = add_prompted_task(
    "synthetic_glue", "mrpc", "replace", ["train"],
    root=FOLDER, vocabulary=vocabulary, name="mine_replace",
)
seqio.MixtureRegistry.add("mine", [task.name], default_rate=1.0)
feature = seqio.Feature(vocabulary)
source = seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"])
seqio.TaskRegistry.add("plain", source, preprocessors=[], output_features={"targets": feature})
print("mine_tasks has been imported", flush=True)
"""
# Said before seconds of imports, on a terminal as in a pipe.
BEFORE_IMPORTS = [
    "reading the list of tasks ...",
    "importing the tasks, with TensorFlow and SeqIO ...",
]


def test_a_module_that_adds_to_seqio_itself_is_cached_as_far_as_its_tasks_are_prompts(tmp_path):
    (tmp_path / "mine_tasks.py").write_text(SEQIO_MODULE)
    arguments = ("--module_import=mine_tasks", f"--output_cache_dir={tmp_path / 'cache'}")
    code, shown = run_on_terminal(*arguments, "--mixture=mine", PYTHONPATH=str(tmp_path))
    assert code == 0, shown
    before, _, after = shown.partition("mine_tasks has been imported\n")
    # A slow machine also says every ten seconds that it still imports.
    assert before.splitlines()[:2] == BEFORE_IMPORTS
    assert "Cached 1 of 1 task in" in after
    assert (tmp_path / "cache" / "mine_replace" / "COMPLETED").is_file()
    done = run(*arguments, "--tasks=plain", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "seqio_cache_tasks" in done.stderr
    assert done.stderr.splitlines()[:2] == BEFORE_IMPORTS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--mixture t0_eval_score_eval"),
        (
            (DEMO, "--tasks=demo_synthetic_imdb_Reviewer_Sentiment_Feelin"),
            "demo_synthetic_imdb_Reviewer_Sentiment",
        ),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(tmp_path, arguments, said):
    done = run(*arguments, f"--output_cache_dir={tmp_path / 'cache'}")
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").glob("[!.]*"))
