"""Whatever is wrong with a T5X gin file ends in a record or an error of what, where and fix."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from t0repro.config.run import TrainRun
from t0repro.config.t5x import gin_files
from t0repro.config.t5x.run import read_run
from t0repro.errors import UserError

from ..mutations import FUZZ, folder_for_files, mutated

TEXT = """\
# A user's run.
from __gin__ import dynamic_registration

import __main__ as train_script
import t0repro.tasks.task
from t5x import utils
from t5x import optimizers
import optax

include 't5x/examples/t5/t5_1_1/small.gin'
include 't5x/configs/runs/pretrain.gin'

MIXTURE_OR_TASK_NAME = 'a_task'
TASK_FEATURE_LENGTHS = {'inputs': 64,
                        'targets': 16}
TRAIN_STEPS = 20
MODEL_DIR = 'runs/a'
DROPOUT_RATE = 0.1
BATCH_SIZE = 4
train_script.train.random_seed = 42
train/utils.DatasetConfig.seed = 42
utils.create_learning_rate_scheduler.warmup_steps = 10
OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.clip(), @optax.adamw()]
optax.clip.max_delta = 1.0
optax.adamw:
  learning_rate = 1e-3
  b1 = 0.9
"""


def parse(text: str | bytes, folder: Path) -> gin_files.Parsed:
    file = folder / "mine.gin"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return gin_files.parse(gin_files.T5xInputs("train", (str(file),)))


def check_ends_well(text: bytes, folder: Path) -> None:
    """A record that becomes a run, or an error; nothing is caught but errors for users."""
    try:
        assert isinstance(read_run(parse(text, folder)), TrainRun)
    except UserError as error:
        assert error.what and error.where and error.fix
        assert len(str(error)) < 3000


def test_the_run_itself_is_a_record(tmp_path):
    assert parse(TEXT, tmp_path).program["total_steps"] == 20


def test_a_byte_order_mark_is_named(tmp_path):
    with pytest.raises(UserError, match="byte order mark") as error:
        parse(b"\xef\xbb\xbf" + TEXT.encode(), tmp_path)
    assert "mine.gin:1" in str(error.value.where)


def test_a_name_that_a_module_lacks_is_answered_with_all_of_its_names_in_one_order(tmp_path):
    text = TEXT.replace("import optax", "import t5x\nMINE = @t5x.examples.nope.A")
    with pytest.raises(UserError) as error:
        parse(text, tmp_path)
    assert error.value.fix.endswith("(of decoder_only, scalable_t5, t5).")


@settings(max_examples=150, derandomize=True, **FUZZ)
@given(text=mutated(TEXT))
def test_a_mutated_file_is_a_record_or_an_error_of_what_where_and_fix(tmp_path_factory, text):
    check_ends_well(text, folder_for_files(tmp_path_factory))


@pytest.mark.slow
@pytest.mark.timeout(7200)  # 20,000 files take minutes, on a busy machine half an hour
@settings(max_examples=20_000, **FUZZ)
@given(text=mutated(TEXT))
def test_20_000_mutated_files_are_records_or_errors_of_what_where_and_fix(tmp_path_factory, text):
    check_ends_well(text, folder_for_files(tmp_path_factory))


def test_a_gin_file_of_mesh_tensorflow_s_is_told_its_command(tmp_path):
    text = "import mesh_tensorflow.transformer.utils\nutils.run.train_steps = 3\n"
    with pytest.raises(UserError, match=r"(?s)is Mesh TensorFlow's.*t5_mesh_transformer"):
        parse(text, tmp_path)


@pytest.mark.parametrize("imports", ["", "from t5x import trainer\n"])
def test_a_file_without_dynamic_registration_is_to_begin_with_it_or_to_follow_one(
    tmp_path, imports
):
    with pytest.raises(UserError, match="No configurable matching 'trainer.Trainer'") as error:
        parse(f"{imports}trainer.Trainer.num_microbatches = 2\n", tmp_path)
    lines = "`from __gin__ import dynamic_registration` and `from t5x import trainer`"
    assert lines in error.value.fix and "Or name the file after one" in error.value.fix


def test_a_misspelled_function_of_an_override_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "mine.gin").write_text(TEXT)
    overrides = ("utils.DatasetConfg.seed=1",)
    with pytest.raises(UserError, match="No configurable matching") as error:
        gin_files.parse(gin_files.T5xInputs("train", (str(tmp_path / "mine.gin"),), overrides))
    assert error.value.fix.startswith("Nearest: 'DatasetConfig'")


@pytest.mark.parametrize(
    "name, line",
    [
        ("network", "from t5x.examples.t5 import network"),
        ("adapters", "from t0repro import adapters"),
        ("seqio", "import seqio"),
        ("trainer", "from t5x import trainer"),
    ],
)
def test_a_name_without_an_import_line_is_answered_with_the_line_that_defines_it(
    tmp_path, name, line
):
    with pytest.raises(UserError, match=f"defines '{name}'") as error:
        parse(f"{TEXT}{name}.a = 1\n", tmp_path)
    assert f"such as `{line}`." in error.value.fix


def test_an_unknown_factor_of_the_learning_rate_is_refused_where_the_file_is_read(tmp_path):
    binding = "utils.create_learning_rate_scheduler.factors = 'constant * linear_warmpu'"
    with pytest.raises(UserError, match="no factor called 'linear_warmpu'") as error:
        read_run(parse(f"{TEXT}{binding}\n", tmp_path))
    assert "mine.gin:29" in error.value.where
    assert "nearest: 'linear_warmup'" in error.value.fix


def test_a_misspelled_scope_is_refused_also_in_a_file(tmp_path):
    with pytest.raises(UserError, match="does not read trian/utils.DatasetConfig.pack") as error:
        parse(f"{TEXT}trian/utils.DatasetConfig.pack = False\n", tmp_path)
    assert "mine.gin:29" in error.value.where
    assert "'train/utils.DatasetConfig'" in error.value.fix


@pytest.mark.parametrize("value", ["8", "@adapters.lora"])
def test_what_is_no_adapter_is_answered_with_how_a_gin_file_writes_one(tmp_path, value):
    text = TEXT.replace("import optax", "import optax\nfrom t0repro import adapters")
    with pytest.raises(UserError, match="must be @adapters.lora\\(\\) or @adapters.ia3") as error:
        parse(f"{text}train_script.train.adapter = {value}\n", tmp_path)
    assert error.value.fix == "Bind @adapters.lora() or @adapters.ia3(), or None."
