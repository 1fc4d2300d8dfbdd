"""Whatever is wrong with gin's inputs ends in a TrainRun or an error of what, where and fix."""

import contextlib
import io
import os
from pathlib import Path

import gin.config
import pytest
from hypothesis import given, settings

from t0repro.config.gin.imports import list_imports
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.run import TrainRun
from t0repro.errors import UserError

from .mutations import FUZZ, folder_for_files, mutated

pytestmark = pytest.mark.mtf

TEXT = """\
# A recipe.
import t5.models.mesh_transformer
include 'demo/t5.1.1.demo.gin'
include 'learning_rate_schedules/constant_0_001.gin'

MIXTURE_NAME = 'demo_train'
width = 64
d_model = %width
dropout_rate = 0.1
decoder/Unitransformer.label_smoothing = 0.1
mesh_train_dataset_fn.seed = 1
serialize_num_microbatches.tokens_per_microbatch_per_replica = 256
utils.run.mesh_shape = []
utils.run.optimizer = @optimize.AdafactorOptimizer
AdafactorOptimizer.beta1 = 0.0
run.train_steps = 20
run.batch_size = ('tokens_per_batch', 512)
run.sequence_length = {'inputs': 64,
                       'targets': 16}
run.learning_rate_schedule = [0.5, @learning_rate_schedules.linear_decay]
"""


def load(text: str | bytes, folder: Path, *params: str) -> TrainRun:
    file = folder / "mine.gin"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    inputs = MeshInputs(
        "a_model_dir", ("dataset.gin", str(file)), params, module_imports=("t0repro.tasks.demo",)
    )
    return dialect.load(inputs).run


def refusal(text: str | bytes, folder: Path, *params: str) -> UserError:
    with pytest.raises(UserError) as error:
        load(text, folder, *params)
    assert error.value.what and error.value.where and error.value.fix
    assert len(str(error.value)) < 2000
    return error.value


@pytest.mark.parametrize(
    "name",
    [
        "utils.run.init_checkpoint",
        "run.eval_summary_dir",
        "slow/save_scores.scores_filename",
        "decode_from_file.input_filename",
        "width",
    ],
)
def test_an_address_of_an_unknown_scheme_is_refused_whatever_it_is_of(name, tmp_path):
    binding = f"{name} = 'foo://bucket/run'"
    error = refusal(TEXT, tmp_path, binding)
    assert "foo://bucket/run cannot be opened: foo:// is not a known scheme" in error.what
    assert error.where == f"--gin_param {binding!r}"


def test_the_recipe_itself_is_a_run(tmp_path):
    assert load(TEXT, tmp_path).model.d_model == 64


@pytest.mark.parametrize(
    ("line", "what", "where", "fix"),
    [
        ("run.train_steps = %NOSUCH", "NOSUCH has no value", "mine.gin:21", "NOSUCH = ..."),
        ("include 'no_such.gin'", "no gin file no_such.gin", "mine.gin:21", "location_prefix"),
        ("run.train_steps = (1,", "ends in the middle", "mine.gin:2", "Correct"),
        ("run.train_steps = = 3", "not a gin statement", "mine.gin:21", "Correct"),
        ("d = gs://b/x", "statement: 'gs' is not a value.", "mine.gin:21", "in quotation marks"),
        ("d = ~/x", "statement: Unable to parse value.", "mine.gin:21", "in quotation marks"),
        ("d =", "statement: Unable to parse value.", "mine.gin:21", "variable of the shell's"),
        ("d = a.b()", "'a' is not a value", "mine.gin:21", "Write @a.b(): gin calls"),
        ("d = true", "'true' is not a value", "mine.gin:21", "Write True"),
        ("d = no", "'no' is not a value", "mine.gin:21", "Write False"),
        ("d = On", "'On' is not a value", "mine.gin:21", "Write True"),
        ("d = NULL", "'NULL' is not a value", "mine.gin:21", "Write None"),
        ("d\u00a0= 4", "Couldn't parse statement", "mine.gin:21", "a plain space for U+00A0"),
        ("d = 4\u200b", "Expected newline", "mine.gin:21", "U+200B"),
        ("d = \u201cabc\u201d", "Unable to parse value", "mine.gin:21", "straight quotation marks"),
        ("run.train_stepz = 3", "'train_stepz'", "mine.gin:21", "'train_steps'"),
        ("runn.train_steps = 3", "'runn'", "mine.gin:21", "'run'"),
        ("run.optimizer = @AdafactorOptimiser", "AdafactorOptimiser", "mine.gin", "'Adafactor"),
        ("include 'mine.gin'", "include each other", "mine.gin", "Remove"),
        ("run.mesh_shape = @tpu_mesh_shape()", "tpu_topology", "mine.gin:21", "tpu_topology"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_file_and_line(tmp_path, line, what, where, fix):
    folders = {"include 'mine.gin'": f"include '{tmp_path / 'mine.gin'}'"}
    error = refusal(f"{TEXT}{folders.get(line, line)}\n", tmp_path)
    assert what in error.what
    assert where in str(error.where)
    assert fix in str(error.fix)


def test_a_folder_in_place_of_a_file_is_answered_with_its_files(tmp_path, monkeypatch):
    # Like TensorFlow's reader, which `import gin.tf` adds: a folder is an empty file.
    readers = [*gin.config._FILE_READERS, (lambda path: io.StringIO(), os.path.exists)]
    monkeypatch.setattr(gin.config, "_FILE_READERS", readers)
    folder = tmp_path / "runs"
    folder.mkdir()
    error = refusal(f"{TEXT}include '{folder}'\n", tmp_path)
    assert (error.what, error.fix) == (
        f"{folder} is a folder, not a gin file.",
        "Name a gin file; no .gin file is directly in this folder.",
    )
    assert "mine.gin:21" in str(error.where)
    for name in ("b", "a", "d", "c"):
        (folder / f"{name}.gin").touch()
    error = refusal(f"{TEXT}include '{folder}'\n", tmp_path)
    assert error.fix == f"Name a file in it: {folder}/a.gin, {folder}/b.gin, {folder}/c.gin, ..."
    with pytest.raises(UserError, match=f"{folder} is a folder"):
        list_imports([str(folder)], (), (), None)


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    error = refusal(TEXT.encode() + b"\nx = '\xff\xfe'\n", tmp_path)
    assert "UTF-8" in error.what and "mine.gin" in str(error.where)


def test_a_byte_order_mark_is_named(tmp_path):
    error = refusal(b"\xef\xbb\xbf" + TEXT.encode(), tmp_path)
    assert "byte order mark" in error.what and "mine.gin:1" in str(error.where)


def test_a_file_that_was_cut_is_named(tmp_path):
    error = refusal(TEXT[: TEXT.index("'targets'")], tmp_path)
    assert "mine.gin" in str(error.where)


def test_what_only_mesh_tensorflow_does_by_default_is_named_as_a_default(tmp_path):
    error = refusal(TEXT.replace("include 'demo", "# include 'demo"), tmp_path)
    assert error.where == "default of Unitransformer.positional_embedding"


# ---- Macros -------------------------------------------------------------------------------------


def test_a_misspelled_macro_on_the_command_line_is_refused_with_the_nearest_name(tmp_path):
    error = refusal(TEXT, tmp_path, "d_modle = 10")
    assert "d_modle" in error.what and "'d_model'" in str(error.fix)
    assert error.where == "--gin_param 'd_modle = 10'"


def test_a_macro_whose_reader_was_overridden_is_warned_of(tmp_path, capsys):
    assert load(TEXT, tmp_path, "width = 32", "d_model = 48").model.d_model == 48
    warned = capsys.readouterr().err
    assert "--gin_param 'width = 32': what reads the macro width is overridden" in warned


def test_t0s_macros_that_the_model_file_does_not_read_say_what_to_bind(tmp_path):
    error = refusal(TEXT, tmp_path, "tokens_per_batch = 1048576", "model_info = 'info.txt'")
    assert "tokens_per_batch, model_info" in error.what
    assert "run.batch_size = ('tokens_per_batch', N)" in str(error.fix)
    assert "model_info_file" in str(error.fix)


def test_a_name_without_its_configurable_is_given_one(tmp_path):
    assert "'run.train_steps'" in str(refusal(TEXT, tmp_path, "train_steps = 5").fix)


def test_an_unread_macro_in_a_file_is_warned_of_by_its_line(tmp_path, capsys):
    assert load(f"{TEXT}d_modle = 10\n", tmp_path).model.d_model == 64
    warned = capsys.readouterr().err
    assert "mine.gin:21: nothing reads the macro d_modle" in warned and "'d_model'" in warned
    load(TEXT, tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", ["width = %width", "width = %tall\ntall = %width"])
def test_macros_that_lead_back_to_themselves_are_refused(tmp_path, line):
    error = refusal(f"{TEXT}{line}\n", tmp_path)
    assert "without end" in error.what


# ---- Fuzz ---------------------------------------------------------------------------------------


def check_ends_well(text: bytes, folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # warnings of macros
        try:
            config = load(text, folder)
        except UserError as error:
            assert error.what and error.where and error.fix
            assert len(str(error)) < 3000
        else:
            assert isinstance(config, TrainRun)


@settings(max_examples=500, derandomize=True, **FUZZ)
@given(text=mutated(TEXT))
def test_a_mutated_file_is_a_run_or_an_error_of_what_where_and_fix(tmp_path_factory, text):
    check_ends_well(text, folder_for_files(tmp_path_factory))


@pytest.mark.slow
@pytest.mark.timeout(7200)  # 20,000 files take minutes, on a busy machine half an hour
@settings(max_examples=20_000, **FUZZ)
@given(text=mutated(TEXT))
def test_20_000_mutated_files_are_runs_or_errors_of_what_where_and_fix(tmp_path_factory, text):
    check_ends_well(text, folder_for_files(tmp_path_factory))


def test_a_mesh_that_nothing_sizes_is_answered_with_shapes_that_would_do(tmp_path):
    error = refusal(TEXT.replace("utils.run.mesh_shape = []\n", ""), tmp_path)
    assert "utils.run.mesh_shape = []" in error.fix
    assert "utils.run.mesh_shape = 'batch:4,model:2'" in error.fix
