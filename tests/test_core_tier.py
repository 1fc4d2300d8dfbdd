"""The core tier does T0's job where no package beyond its lock can be imported."""

import json
import os
import subprocess
import sys

import pytest

from t0repro.tasks.modules import load_tasks

from .helpers.locks import beyond_the_core, hide_all_but_the_core
from .runs.tiny_gin import MODEL, SIZES
from .tasks.prompt_caches import files, make

TASKS = "--module_import=t0repro.tasks.demo"
MIXTURES = ("demo_train", "demo_eval_score_eval")
GENERATED = "demo_synthetic_glue_mrpc_want_to_know"
OF_REFERENCE = {"tensorflow", "tensorflow_text", "mesh_tensorflow", "t5", "seqio"}
CONVERTED = ("mtf", "hf", "t5x")

# Calls each command's function, and writes what the command printed and the code it ended with. The
# commands of a list share a fork: one process of all, but for Mesh TensorFlow's dialect, since a
# process parses t5's flags once.
DRIVER = """
import contextlib, importlib, importlib.util, io, json, os, sys

from t0repro.cli.app import main
from t0repro.cli.t5_mesh_transformer import console_entry_point as t5_mesh_transformer


def run(commands):
    for name, function, arguments in commands:
        sys.argv, code = [function, *arguments], 0
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                globals()[function]()
            except SystemExit as end:
                code = end.code
        yield name, (code or 0, out.getvalue())


if __name__ == "__main__":  # and not in the workers of `t0repro cache`
    names, lists = json.loads(sys.stdin.read())
    found = [name for name in names if importlib.util.find_spec(name)]
    for module in ("train", "evaluate", "batch_infer", "rank_eval"):
        importlib.import_module(f"t0repro.runs.{module}")
    for number, commands in enumerate(lists):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            assert not status, commands
            continue
        results = {"found": found, **dict(run(commands))}
        with open(f"results_{number}.json", "w") as file:
            json.dump(results, file)
        break
"""


def t5x(mode: str, *bindings: str) -> list[str]:
    """Flags of T5X's dialect for the tiny model on the demo."""
    run_file = f"--gin_file=t5x/configs/runs/{mode}.gin"
    gin = [*SIZES, "DROPOUT_RATE = 0.0", "USE_CACHED_TASKS = True",
           "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}", *bindings]  # fmt: skip
    return [f"--gin_file={MODEL}", run_file, *(f"--gin_bindings={each}" for each in gin), TASKS]


def mesh(folder, *arguments: str) -> list[str]:
    """Flags of Mesh TensorFlow's dialect, with the cache."""
    cache = f"--additional_task_cache_dirs={folder}/cache"
    return ["--backend=jax", f"--model_dir={folder}/mesh", TASKS, cache, *arguments]


def commands(folder) -> list[tuple[str, str, list[str]]]:
    """Name, function and arguments of each command, in the order in which they need each other."""
    cli, t5 = "main", "t5_mesh_transformer"
    cached = f"--seqio_additional_cache_dirs={folder}/cache"
    run = [f"MODEL_DIR = '{folder}/run'", "MIXTURE_OR_TASK_NAME = 'demo_train'", "BATCH_SIZE = 8",
           "TRAIN_STEPS = 2", "train_eval/utils.DatasetConfig.split = 'train'"]  # fmt: skip
    of_split = "MIXTURE_OR_TASK_SPLIT = 'validation'"
    restored = f"CHECKPOINT_PATH = '{folder}/run'"
    evaluated = [f"EVAL_OUTPUT_DIR = '{folder}/eval'", of_split, restored,
                 f"MIXTURE_OR_TASK_NAME = '{GENERATED}_score_eval'",
                 "seqio.Evaluator.num_examples = 8"]  # fmt: skip
    inferred = [f"INFER_OUTPUT_DIR = '{folder}/infer'", of_split, restored,
                f"MIXTURE_OR_TASK_NAME = '{GENERATED}_score_eval'",
                "infer.mode = 'score'"]  # fmt: skip
    gin = [
        "--gin_param=MIXTURE_NAME = 'demo_train'", "--gin_param=run.train_steps = 2",
        "--gin_param=run.batch_size = 4", "--gin_param=utils.run.mesh_shape = []",
        "--gin_param=run.sequence_length = {'inputs': 64, 'targets': 16}",
        "--gin_param=mesh_train_dataset_fn.use_cached = True",
    ]  # fmt: skip
    again = [f"--gin_file={folder}/mesh/operative_config.gin", "--gin_file=score_eval.gin",
             f"--gin_param=MIXTURE_NAME = '{GENERATED}_score_eval'",
             "--gin_param=run.dataset_split = 'validation'",
             "--gin_param=mesh_eval_dataset_fn.use_cached = True",
             "--gin_param=mesh_eval_dataset_fn.num_eval_examples = 8"]  # fmt: skip
    constant = "--gin_file=learning_rate_schedules/constant_0_001.gin"
    files_of_t5 = ["--gin_file=dataset.gin", "--gin_file=demo/t5.1.1.demo.gin", constant]
    ranked = [f"--checkpoint={folder}/run", "--mixture=demo_eval_score_eval", TASKS, "--limit=2",
              f"--out={folder}/evaluated", "--inputs_length=64", "--targets_length=16"]  # fmt: skip
    # Without a cache, in shards, with saved positions and the metrics of decoded texts.
    tuned = [f"MODEL_DIR = '{folder}/tuned'",
             f"INITIAL_CHECKPOINT_PATH = '{folder}/run/checkpoint_2'",
             "MIXTURE_OR_TASK_NAME = 'demo_train'", "BATCH_SIZE = 8", "USE_CACHED_TASKS = False",
             "train/utils.DatasetConfig.num_shards = 2", "EVAL_PERIOD = 1",
             "train_eval/utils.DatasetConfig.split = 'train'", "EVAL_STEPS = 1",
             f"infer_eval/utils.DatasetConfig.mixture_or_task_name = '{GENERATED}'",
             "EVALUATOR_NUM_EXAMPLES = 8", "utils.SaveCheckpointConfig.period = 1",
             "utils.SaveCheckpointConfig.save_dataset = True"]  # fmt: skip
    uncached = ["--gin_param=mesh_train_dataset_fn.use_cached = False",
                "--gin_param=t0repro.jax_training.data_shards = 2"]  # fmt: skip
    of_rows = ["--gin_param=MIXTURE_NAME = 'demo_train'", "--gin_param=run.dataset_split = 'train'",
               "--gin_param=run.batch_size = 4"]  # fmt: skip
    scores = [f"--gin_param=scores_filename = '{folder}/scores'",
              "--gin_param=run.eval_checkpoint_step = -1",
              "--gin_param=mesh_eval_dataset_fn.num_eval_examples = 3"]  # fmt: skip
    saved = f"--gin_file={folder}/mesh/operative_config.gin"
    perplexity = ["--gin_param=utils.run.perplexity_eval_steps = 2",
                  "--gin_param=mesh_eval_dataset_fn.pack = True"]  # fmt: skip
    caching = [f"--mixture={','.join(MIXTURES)}", f"--output_cache_dir={folder}/cache"]
    return [
        ("cache", cli, ["cache", *caching, "--min_shards=2", TASKS]),
        ("train", cli, ["train", *t5x("pretrain", *run), cached]),
        ("eval", cli, ["eval", *t5x("eval", *evaluated), cached]),
        ("infer", cli, ["infer", *t5x("infer", *inferred), cached]),
        ("infer a shard", cli, ["infer", "--shard_id=1",
                                *t5x("infer", *inferred, "infer.num_shards = 2"), cached]),
        ("train on rows", cli, ["train", *t5x("finetune", *tuned, "TRAIN_STEPS = 4")]),
        ("go on", cli, ["train", *t5x("finetune", *tuned, "TRAIN_STEPS = 5")]),
        ("mesh train", t5, mesh(folder, *files_of_t5, *gin)),
        ("mesh score_eval", t5, mesh(folder, *again)),
        ("mesh train on rows", t5, ["--backend=jax", f"--model_dir={folder}/rows", TASKS,
                                    *files_of_t5, *gin, *uncached]),
        ("mesh perplexity_eval", t5, mesh(folder, saved, "--gin_file=perplexity_eval.gin",
                                          *of_rows, *perplexity)),
        ("mesh score_from_dataset", t5, mesh(folder, saved, "--gin_file=score_from_task.gin",
                                             *of_rows, *scores)),
        ("rank-eval", cli, ["rank-eval", *ranked]),
        ("report", cli, ["report", "make", f"{folder}/evaluated/validation_eval", TASKS,
                         f"--out={folder}/report"]),
        ("verify", cli, ["report", "verify", f"{folder}/report", TASKS, "--sample=2"]),
        *((f"to {to}", cli, ["convert", f"{folder}/run", f"{folder}/{to}", "--to", to])
          for to in CONVERTED),
        *((f"diff {to}", cli, ["checkpoint", "diff", f"{folder}/run", f"{folder}/{to}"])
          for to in CONVERTED),
        ("doctor", cli, ["doctor", "--json"]),
    ]  # fmt: skip


def refused(folder) -> list[tuple[str, str, list[str]]]:
    """The same of commands that need the reference tier, or name what there is not."""
    cli, t5 = "main", "t5_mesh_transformer"
    run = [f"MODEL_DIR = '{folder}/none'", "MIXTURE_OR_TASK_NAME = 'demo_train'", "TRAIN_STEPS = 2"]
    other = [*run, "train_eval/utils.DatasetConfig.shuffle = True"]
    again = f"--gin_file={folder}/mesh/operative_config.gin"
    packed = "--gin_param=mesh_eval_dataset_fn.pack = True"
    return [
        ("train with shuffled train_eval", cli, ["train", *t5x("pretrain", *other)]),
        ("an unknown mixture", cli, ["train", *t5x("pretrain", *run,
                                                   "MIXTURE_OR_TASK_NAME = 'demo_trian'")]),
        ("mesh eval of packed rows", t5, mesh(folder, again, "--gin_file=eval.gin", packed,
                                              "--gin_param=run.dataset_split = 'train'")),
        ("mesh on Mesh TensorFlow", t5, ["--backend=mtf", f"--model_dir={folder}/none", again]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder in which all commands have run, and what they printed."""
    folder, results = tmp_path_factory.mktemp("core"), {}
    hide_all_but_the_core(folder)
    (folder / "driver.py").write_text(DRIVER)
    names = [*sorted(OF_REFERENCE), "jax", "promptsource", "t0repro"]
    listed = [*commands(folder), *refused(folder)]
    alone = [[each] for each in listed if each[1] == "t5_mesh_transformer"]
    lists = [[each for each in listed if [each] not in alone], *alone]
    done = subprocess.run(
        [sys.executable, "-P", "driver.py"],
        input=json.dumps([names, lists]),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for number in range(len(lists)):
        results |= json.loads((folder / f"results_{number}.json").read_text())
    return folder, results


@pytest.fixture
def folder(ran):
    return ran[0]


@pytest.fixture
def results(ran):
    return ran[1]


def test_what_is_hidden_cannot_be_imported_and_the_core_can(results):
    assert OF_REFERENCE <= beyond_the_core()
    assert results["found"] == ["jax", "promptsource", "t0repro"]


@pytest.mark.parametrize("name", [name for name, *_ in commands("")])
def test_each_command_succeeds(results, name):
    code, printed = results[name]
    assert code == 0, printed


def test_what_needs_the_reference_tier_is_named(results):
    code, printed = results["train with shuffled train_eval"]
    assert code == 2 and "train_eval's data has no seed or is shuffled" in printed
    assert "TIER=reference bash scripts/setup.sh" in printed
    code, printed = results["an unknown mixture"]
    assert code == 2 and "There is no task or mixture 'demo_trian'." in printed
    assert "fix: Nearest: 'demo_train'" in printed and "(%MIXTURE_OR_TASK_NAME" in printed
    code, printed = results["mesh eval of packed rows"]
    assert code == 2 and "mode eval reads packed or shuffled examples" in printed
    code, printed = results["mesh on Mesh TensorFlow"]
    assert code == 2 and "This needs t5, which is not installed" in printed
    assert "TIER=reference bash scripts/setup.sh" in printed


def test_without_a_cache_it_trains_evaluates_and_resumes(folder, results):
    assert "data: after 2 batches, which are rebuilt and skipped" in results["go on"][1]
    position = json.loads((folder / "tuned/checkpoint_5/data/position.json").read_text())
    assert position["batches"] == 3
    assert len(list((folder / "tuned/inference_eval").glob(f"{GENERATED}-00000*.jsonl"))) == 3
    rows = [json.loads(line) for line in (folder / "rows/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2


def test_it_scores_and_computes_perplexities_of_datasets(folder):
    # Three examples of each of the mixture's tasks.
    assert len((folder / "scores.scores").read_text().splitlines()) % 3 == 0
    rows = [json.loads(line) for line in (folder / "mesh/metrics.jsonl").read_text().splitlines()]
    assert any(row.get("neg_log_perplexity", 0) < 0 for row in rows)


def test_doctor_names_the_core_tier(results):
    found = json.loads(results["doctor"][1][results["doctor"][1].index("{") :])
    assert found["tier"] == "core" and found["works"]


def test_its_caches_are_those_of_the_reference_tier(folder, tmp_path):
    load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    make(tmp_path, mixtures=MIXTURES, min_shards=2)
    of_core, of_reference = files(folder / "cache"), files(tmp_path)
    assert of_core.keys() == of_reference.keys()
    for name, content in of_core.items():
        if name.endswith("/provenance.json"):  # which says what is installed
            made, expected = json.loads(content), json.loads(of_reference[name])
            assert expected.pop("versions").items() > made.pop("versions").items()
            assert made == expected
        else:
            assert content == of_reference[name]


def test_it_trains_evaluates_and_reports(folder):
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2
    assert len(json.loads((folder / "report" / "report.json").read_text())["datasets"]) == 5
    # Without pyarrow there is no Parquet.
    assert [path.name for path in (folder / "evaluated").glob("scores.*")] == ["scores.csv"]
    for name in (f"eval/inference_eval/{GENERATED}_score_eval-000002.jsonl",
                 f"mesh/validation_eval/{GENERATED}_score_eval_2_predictions"):  # fmt: skip
        assert len((folder / name).read_text().splitlines()) == 8
    (scored,) = folder.glob("infer/*.jsonl-00000-of-00001")
    assert all("score" in json.loads(line) for line in scored.read_text().splitlines())
