"""T5X's gin files, parsed without T5X: values, places, imports, and what is refused."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gin
from t0repro.cli.spelling import T5X_NAMES
from t0repro.config.data import LoggerConfig
from t0repro.config.gin import folders
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.layout import list_differences
from t0repro.config.t5x.run import read_eval_run
from t0repro.errors import UserError
from t0repro.words import shown_as

MODEL = "t5x/examples/t5/t5_1_1/small.gin"
RUNS = "t5x/configs/runs/{}.gin"
PRETRAIN = RUNS.format("pretrain")
REQUIRED = (
    "DROPOUT_RATE = 0.0",
    "MIXTURE_OR_TASK_NAME = 'a_task'",
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}",
    "TRAIN_STEPS = 10",
    "MODEL_DIR = 'runs/a'",
)
# The macros that each of T5X's own gin files needs, as T5X's parser reports them.
MACROS = Path(__file__).resolve().parents[4] / "shared" / "t5x-data" / "gin_macros.json"


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin.clear_config()


def parse(*bindings: str, files=(MODEL, PRETRAIN), run_mode="train", required=REQUIRED):
    return gin_files.parse(
        gin_files.T5xInputs(run_mode, tuple(files), (*required, *bindings), ("elsewhere", "."))
    )


def value(parsed: gin_files.Parsed, name: str) -> gin_files.Value:
    return next(item for item in parsed.values if item.name == name)


def test_a_users_pretraining_file_becomes_one_record(tmp_path):
    (tmp_path / "c4.gin").write_text(
        """
from __gin__ import dynamic_registration

import __main__ as my_script
import t5.data.mixtures
from t5x import utils

include 't5x/examples/t5/t5_1_1/small.gin'
include 't5x/configs/runs/pretrain.gin'

MIXTURE_OR_TASK_NAME = "c4_v220_span_corruption"
TASK_FEATURE_LENGTHS = {"inputs": 512, "targets": 114}
TRAIN_STEPS = 10000
DROPOUT_RATE = 0.0
BATCH_SIZE = 256
my_script.train.random_seed = 42
train/utils.DatasetConfig.seed = 42
utils.SaveCheckpointConfig.save_dataset = True
"""
    )
    parsed = parse(files=[str(tmp_path / "c4.gin")], required=("MODEL_DIR = 'runs/c4'",))
    program = parsed.program
    data, checkpoints = program["train_dataset_cfg"], program["checkpoint_cfg"]
    assert program["model"]["module"]["config"]["emb_dim"] == 512
    assert (data["batch_size"], data["seed"], program["random_seed"]) == (256, 42, 42)
    assert checkpoints["save"]["save_dataset"] and not checkpoints["restore"]["path"]
    assert program["trainer_cls"]["learning_rate_fn"]["factors"] == "constant * rsqrt_decay"
    assert parsed.imports == ("t5.data.mixtures",) and parsed.warnings == ()


def test_nothing_called_t5x_stays_importable_and_nothing_heavy_is_imported():
    script = f"""
import sys
from t0repro.config.t5x import gin_files
gin_files.parse(gin_files.T5xInputs("train", {(MODEL, PRETRAIN)!r}, {REQUIRED!r}))
print(*sorted({{"t5x", "seqio", "t5", "tensorflow", "jax"}} & set(sys.modules)))
try:
    import t5x
except ImportError:
    print("not importable")
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.stdout == "\nnot importable\n", done.stderr


def test_nothing_stays_in_gin():
    import gin.config

    registered = set(gin.config._REGISTRY._selector_map)
    parse()
    added = set(gin.config._REGISTRY._selector_map) - registered
    assert not added and not gin.config._CONFIG


def test_an_installed_t5x_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "t5x").mkdir()
    (tmp_path / "t5x" / "__init__.py").write_text("raise RuntimeError('T5X was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert parse().program["model_dir"] == "runs/a"


def test_every_value_has_the_place_that_set_it():
    parsed = parse("train/utils.DatasetConfig.batch_size = 7")
    batch_size = value(parsed, "train/utils.DatasetConfig.batch_size")
    assert batch_size.value == "7" and batch_size.place.startswith("--gin_bindings")
    assert value(parsed, "train_eval/utils.DatasetConfig.batch_size").value == "128"
    layers = value(parsed, "MODEL/network.T5Config.num_encoder_layers")
    assert layers.value == "8" and "t5_1_1/small.gin:" in layers.place
    lengths = value(parsed, "train/utils.DatasetConfig.task_feature_lengths")
    assert (
        lengths.value == "{'inputs': 8, 'targets': 8}" and "%TASK_FEATURE_LENGTHS" in lengths.place
    )
    assert value(parsed, "trainer.Trainer.num_microbatches").value == "None"


def test_a_method_of_the_model_is_configured_as_t5x_does():
    binding = "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4"
    parsed = parse(
        "MIXTURE_OR_TASK_NAME = 'a_task'",
        "INITIAL_CHECKPOINT_PATH = 'a'",
        "EVAL_OUTPUT_DIR = 'b'",
        files=["t5x/examples/t5/t5_1_1/examples/base_wmt14enfr_eval.gin"],
        run_mode="eval",
        required=(),
    )
    assert parsed.program["model"]["predict_batch_with_aux"]["num_decodes"] == 4
    assert parsed.warnings == (), binding


def with_loss_of_2021(folder, binding):
    """Parses a model whose file binds an argument of the loss as T5X's files of 2021 do."""
    (folder / "loss.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom t5x import models\n"
        f"models.EncoderDecoderModel.loss_fn:\n  {binding}\n"
    )
    return parse(files=(MODEL, PRETRAIN, str(folder / "loss.gin")))


@pytest.mark.parametrize("argument, value", [("z_loss", 0.5), ("label_smoothing", 0.25)])
def test_the_loss_is_configured_by_its_method_as_in_t5xs_files_of_2021(tmp_path, argument, value):
    parsed = with_loss_of_2021(tmp_path, f"{argument} = {value}")
    assert parsed.program["model"][argument] == value and parsed.warnings == ()


def test_a_wrong_argument_of_the_loss_is_named_with_its_place(tmp_path):
    with pytest.raises(UserError, match=r"EncoderDecoderModel.loss_fn.z_loss is 'a'") as caught:
        with_loss_of_2021(tmp_path, "z_loss = 'a'")
    assert caught.value.where == f"{tmp_path / 'loss.gin'}:4"


def test_optax_chains_are_described_and_not_made(tmp_path):
    (tmp_path / "adamw.gin").write_text(
        f"""
from __gin__ import dynamic_registration
from t5x import optimizers
import optax
include '{MODEL}'
include '{PRETRAIN}'
OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.clip(), @optax.adamw()]
optax.clip.max_delta = 1.0
optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()
optax.warmup_cosine_decay_schedule:
  init_value = 0.0
  peak_value = 1e-4
  warmup_steps = 1000
  decay_steps = %TRAIN_STEPS
"""
    )
    program = parse(files=[str(tmp_path / "adamw.gin")]).program
    clip, adamw = program["model"]["optimizer_def"]["transformations"]
    assert (clip.configurable, clip.arguments) == ("optax.clip", {"max_delta": 1.0})
    assert adamw["learning_rate"]["decay_steps"] == 10


HEAD = """\
from __gin__ import dynamic_registration
from t5x import optimizers
from t5x import partitioning
from t5x import utils
import optax
"""


def file_of(tmp_path, text: str, head: str = HEAD) -> str:
    """A user's file around T5X's model and run."""
    path = tmp_path / "mine.gin"
    path.write_text(f"{head}include '{MODEL}'\ninclude '{PRETRAIN}'\n{text}\n")
    return str(path)


def test_an_import_of_optax_is_no_import_of_tasks(tmp_path):
    chain = "OPTIMIZER = @optimizers.chain()\noptimizers.chain.transformations = [@optax.lion()]"
    rate = "optax.lion.learning_rate = 1e-4"
    assert parse(files=[file_of(tmp_path, f"{chain}\n{rate}")]).warnings == ()


@pytest.mark.parametrize("line", ["import t5x.own", "import t5x.own as own", "from t5x import own"])
def test_a_module_in_an_authors_copy_of_t5x_that_only_registers_tasks_is_warned_of(tmp_path, line):
    file = file_of(tmp_path, line)
    (warning,) = parse(files=[file]).warnings
    assert "has no t5x.own, so the import does nothing" in warning and file in warning


def test_a_misspelled_module_of_t5x_is_answered_with_the_nearest_where_it_is_used(tmp_path):
    used = "from t5x import utilz\nutilz.DatasetConfig.seed = 1"
    with pytest.raises(UserError, match="does not support the module t5x.utilz") as error:
        parse(files=[file_of(tmp_path, used)])
    assert "'t5x.utils'" in error.value.fix
    assert error.value.where and error.value.where.endswith("utilz.DatasetConfig.seed = 1")


def test_a_name_that_two_modules_share_is_the_one_that_its_own_file_imports(tmp_path):
    (tmp_path / "gpu.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from t5x.contrib.gpu.t5 import network\n"
        "network.T5Config.emb_dim = 64\n"
    )
    text = f"include '{tmp_path}/gpu.gin'"
    parsed = parse(files=[file_of(tmp_path, text)])
    shape = parsed.program["model"]["module"]["config"]
    assert shape.configurable == "network.T5Config" and shape["emb_dim"] == 512
    assert any("does not read network.T5Config.emb_dim" in line for line in parsed.warnings)
    reference = value(parsed, "MODEL/network.Transformer.config").value
    assert reference == "@network.T5Config()"


# An evaluation without T5X's eval.gin, in the names of 2022.
EVALUATION = """\
from __gin__ import dynamic_registration
import __main__ as eval_script
from seqio import evaluation
from seqio import loggers
from t5x import partitioning
from t5x import utils

eval_script.evaluate:
  model = %MODEL
  dataset_cfg = @utils.DatasetConfig()
  partitioner = @partitioning.ModelBasedPjitPartitioner()
  restore_checkpoint_cfg = @utils.RestoreCheckpointConfig()
  output_dir = 'out'
  inference_evaluator_cls = @evaluation.Evaluator
evaluation.Evaluator:
  logger_cls = [@loggers.JSONLogger]
  num_examples = 7
loggers.JSONLogger.write_n_results = 3
partitioning.ModelBasedPjitPartitioner:
  num_partitions = 4
  model_parallel_submesh = (2, 1, 1, 1)
utils.DatasetConfig:
  mixture_or_task_name = 'a_task'
  task_feature_lengths = {'inputs': 8, 'targets': 8}
  split = 'validation'
  batch_size = 2
  shuffle = False
  seed = None
utils.RestoreCheckpointConfig:
  path = 'runs/a'
"""


def test_other_names_for_seqios_and_t5xs_classes_are_known_and_shown(tmp_path):
    (tmp_path / "mine.gin").write_text(EVALUATION)
    files = [MODEL, str(tmp_path / "mine.gin")]
    parsed = parse(files=files, run_mode="eval", required=("DROPOUT_RATE = 0.0",))
    evaluator = read_eval_run(parsed).evaluator
    assert evaluator.num_examples == 7
    assert evaluator.loggers == (LoggerConfig("json", None, 3),)
    (line,) = list_differences(parsed.program)
    name = "partitioning.ModelBasedPjitPartitioner.num_partitions"
    assert line.startswith(f"{tmp_path}/mine.gin:20: {name} = 4 has no effect"), line


ROWS_MODULE = """\
import gin

@gin.configurable
def rows_folder(value="nowhere"):
    return value
"""


DYNAMIC = "from __gin__ import dynamic_registration\n"


def bind_rows(folder, module, source, binding, first=DYNAMIC):
    """The gin files of a run, the last of which imports a module made here and binds in it."""
    (folder / f"{module}.py").write_text(source)
    (folder / "rows.gin").write_text(f"{first}import {module}\n{module}.{binding}\n")
    return [MODEL, PRETRAIN, str(folder / "rows.gin")]


@pytest.mark.parametrize("first", ["", DYNAMIC])
def test_what_a_users_own_functions_are_bound_to_reaches_them(tmp_path, monkeypatch, first):
    name = f"rows_of_{'mine' if first else 'ours'}"  # a module registers its functions once
    monkeypatch.syspath_prepend(tmp_path)
    binding = "rows_folder.value = %ROWS_FOLDER\nROWS_FOLDER = ''"
    files = bind_rows(tmp_path, name, ROWS_MODULE, binding, first)
    parsed = parse(files=files, required=(*REQUIRED, "ROWS_FOLDER = 'rows'"))
    assert not parsed.warnings
    shown = {value.name: value.value for value in parsed.values}
    assert shown[f"{name}.rows_folder.value"] == "'rows'"
    assert importlib.import_module(name).rows_folder() == "rows"
    # The next configuration in this process does not bind them.
    parse()
    assert importlib.import_module(name).rows_folder() == "nowhere"


def test_a_name_that_a_users_module_lacks_is_refused_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    files = bind_rows(tmp_path, "rows_of_theirs", ROWS_MODULE, "row_folder.value = 'rows'")
    with pytest.raises(UserError, match="rows_of_theirs has no row_folder") as caught:
        parse(files=files)
    assert "rows.gin:3" in str(caught.value.where)
    assert "rows_folder" in str(caught.value.fix)


def test_a_users_module_that_uses_what_a_package_lacks_is_named_with_its_line(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    source = "import json\nLOADS = json.loadz\n"
    files = bind_rows(tmp_path, "rows_of_others", source, "rows_folder.value = 'rows'")
    with pytest.raises(UserError, match="has no attribute 'loadz'") as caught:
        parse(files=files)
    assert "rows_of_others.py:2" in str(caught.value.where)


@pytest.mark.parametrize("folder", ["third_party/py", "t5x", "/theirs"])
def test_t5xs_files_are_found_where_an_authors_copy_of_t5x_was(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    named = [f"{folder}/{name}" for name in (MODEL, PRETRAIN)]
    if folder.startswith("/"):  # only this file's author knows what is there
        with pytest.raises(UserError, match="There is no gin file /theirs"):
            parse(files=named)
        return
    assert parse(files=named).values[:3] == parse().values[:3]
    # Their own copy is read first.
    copy = tmp_path / named[0]
    copy.parent.mkdir(parents=True)
    copy.write_text(f"include '{MODEL}'\nLABEL_SMOOTHING = 0.25\n")
    assert any(f"{named[0]}:2" in item.place for item in parse(files=named).values)


def test_a_macro_that_nothing_needs_any_more_may_stay_without_a_value():
    required = tuple(line for line in REQUIRED if not line.startswith("DROPOUT_RATE"))
    override = "network.T5Config.dropout_rate = 0.25"
    parsed = parse(f"from t5x.examples.t5 import network\n{override}", required=required)
    assert parsed.program["model"]["module"]["config"]["dropout_rate"] == 0.25
    with pytest.raises(UserError, match="Macros without a value: DROPOUT_RATE"):
        parse(required=required)


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_an_infinite_number_is_refused_by_its_name_and_place(number):
    with pytest.raises(UserError, match=r"batch_size is -?inf; it must be a whole") as caught:
        parse(f"BATCH_SIZE = {number}")
    assert f"BATCH_SIZE = {number}" in str(caught.value.where)


@pytest.mark.parametrize(
    "bindings, complaint",
    [
        (["LABEL_SMOTHING = 0.1"], "Nothing reads the macro LABEL_SMOTHING[^$]*LABEL_SMOOTHING"),
        (
            ["XYZZY = 0.1"],
            "Correct or remove XYZZY; nothing that is read has a similar name.",
        ),
        (["trian/utils.DatasetConfig.seed = 3"], "does not read trian[^$]*'train/utils.Data"),
        (["infer_eval/utils.DatasetConfig.seed = 3"], "does not read infer_eval/utils.Dataset"),
        (["utils.DatasetConfg.seed = 3"], "DatasetConfg"),
        (["train/utils.DatasetConfig.sed = 3"], "sed[^$]*fix: Nearest: 'seed'"),
        (["train_script.train.random_sed = 3"], "sed[^$]*fix: Nearest: 'random_seed'"),
        (["adafactor.Adafactor.decay_rte = 3"], "rte[^$]*fix: Nearest: 'decay_rate'"),
        (["train/utils.DatasetConfig.num_workers = 4"], "num_workers"),
        (
            ["train/utils.DatasetConfig.module = @utils.override_params_axes_names"],
            "override_params",
        ),
        (["import no_such_package.tasks"], "no_such_package"),
    ],
)
def test_what_nothing_reads_is_named_with_the_nearest_right_name(bindings, complaint):
    with pytest.raises(UserError, match=complaint):
        parse(*bindings)


def test_a_macro_in_a_users_file_that_nothing_reads_is_a_warning(tmp_path):
    (tmp_path / "mine.gin").write_text(f"include '{PRETRAIN}'\nTOPOLOGY = 'v2-32'\n")
    (warning,) = parse(files=[MODEL, str(tmp_path / "mine.gin")]).warnings
    assert "mine.gin:2: nothing reads the macro TOPOLOGY; nothing that is read has a" in warning


def test_a_file_of_other_word_order_is_found_by_its_words():
    with pytest.raises(UserError, match="nearest: [^,]*/small_c4_pretrain.gin") as caught:
        parse(files=["t5x/examples/t5/t5_1_1/examples/c4_pretrain_small.gin"])
    with shown_as(T5X_NAMES), pytest.raises(UserError, match="--gin_search_paths") as in_t5x:
        parse(files=["c4_pretrain_small.gin"])
    assert "--gin_location_prefix" in caught.value.fix
    assert "--gin_location_prefix" not in in_t5x.value.fix
    for name in ("t5_1_1/smal.gin", "t5_1_2/small.gin"):
        with pytest.raises(UserError, match=r"nearest: t5x/examples/t5/t5_1_1/small\.gin"):
            parse(files=[f"t5x/examples/t5/{name}"])


@pytest.mark.parametrize(
    "mode, folder", [("eval", "EVAL_OUTPUT_DIR"), ("infer", "INFER_OUTPUT_DIR")]
)
def test_caches_are_asked_for_by_one_macro_in_every_run_file(mode, folder):
    macros = ("CHECKPOINT_PATH = 'a'", f"{folder} = 'b'", "USE_CACHED_TASKS = True")
    read = parse(*macros, files=[MODEL, RUNS.format(mode)], run_mode=mode, required=REQUIRED[:3])
    assert read.program["dataset_cfg"]["use_cached"] is True


def test_missing_macros_are_all_named_with_what_was_probably_meant():
    with pytest.raises(UserError) as caught:
        parse("TRIAN_STEPS = 10", required=REQUIRED[:3])
    assert "MODEL_DIR (required at" in caught.value.what
    missing = [each.split()[0] for each in caught.value.what.partition(": ")[2].split("; ")]
    assert len(missing) > 1
    assert all(f"--gin.{name.rstrip('.')}=" in caught.value.fix for name in missing)
    assert """--gin.MODEL_DIR="'DIR'\"""" in caught.value.fix
    assert "for which 'TRIAN_STEPS' may be meant" in caught.value.what


def test_a_run_file_without_a_model_says_which_file_to_include():
    with pytest.raises(UserError, match="MODEL[^$]*Include a model's gin file"):
        parse(files=[PRETRAIN], required=REQUIRED[1:])


def test_a_file_for_another_run_mode_is_named():
    with pytest.raises(UserError, match="configures `evaluate`[^$]*these files are for train"):
        parse(run_mode="eval")


def test_a_file_that_adds_to_others_says_so_alone():
    with pytest.raises(UserError, match="train lacks model, [^$]*Include the run file"):
        parse(files=["t5x/examples/t5/local_tiny.gin"], required=())


def test_what_a_file_binds_for_an_evaluation_that_is_off_is_a_warning(tmp_path):
    (tmp_path / "run.gin").write_text(
        f"include '{MODEL}'\ninclude '{PRETRAIN}'\ninclude 't5x/examples/t5/local_tiny.gin'\n"
        "infer_eval/utils.DatasetConfig.batch_size = 3\n"
    )
    parsed = parse(files=[str(tmp_path / "run.gin")])
    (warning,) = parsed.warnings
    assert "run.gin:4: this run does not read infer_eval/utils.DatasetConfig.batch_" in warning
    assert parsed.program["total_steps"] == 10
    assert parsed.program["checkpoint_cfg"]["save"] is None


@pytest.mark.skipif(not MACROS.is_file(), reason="needs the table of T5X's macros")
def test_each_shipped_file_needs_the_macros_that_t5xs_own_needs():
    """Model files are parsed with T5X's own pretraining file; run files with a model of T5X's."""
    table = json.loads(MACROS.read_text())["files"]
    shipped = [name for name in table if (folders.shipped_files() / name).is_file()]
    assert len(shipped) >= 35
    for name in shipped:
        facts = table[name]
        if name.endswith(("local_tiny.gin", "base_wmt14enfr_finetune.gin")):
            continue  # the first adds to others; the second leaves its macros to a controller
        if facts["run_mode"] is None:
            parsed = parse(files=[name, PRETRAIN])
            assert parsed.program["model"].configurable == "models.EncoderDecoderModel", name
            missing = {"DROPOUT_RATE"}
            with pytest.raises(UserError) as caught:
                parse(files=[name, PRETRAIN], required=REQUIRED[1:])
        else:
            bindings, missing = facts["bindings"], set(facts["required_macros"])
            files, run_mode = facts["gin_files"], facts["run_mode"]
            assert parse(files=files, run_mode=run_mode, required=tuple(bindings)), name
            with pytest.raises(UserError) as caught:
                parse(files=files, run_mode=run_mode, required=())
        named = {macro for macro in missing if f"{macro} (required" in caught.value.what}
        assert named == missing, (name, caught.value.what)


def test_the_table_of_t5xs_files_has_the_counts_that_the_page_states():
    docs = Path(__file__).parents[3] / "docs"
    rows = [
        [cell.strip() for cell in line.split(" | ")]
        for line in (docs / "evidence" / "t5x_gin_files.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    read = [row for row in rows if row[2] == "runs"]
    accepted = [row for row in read if row[3].startswith(("runs", "ready"))]
    page = " ".join((docs / "t5x.md").read_text().split())
    assert len(accepted) == len(read)
    assert (
        f"Of the {len(rows)} gin files of T5X and its Vertex AI samples, `explain` reads and"
        f" `--dry_run` accepts [{len(read)}]"
    ) in page
    outcomes = (docs / "evidence" / "t5x_gin_files.md").read_text()
    reasons = re.findall(r"^\| (\d+) \| ", outcomes, re.MULTILINE)
    assert sum(map(int, reasons)) == len(rows) - len(read)
