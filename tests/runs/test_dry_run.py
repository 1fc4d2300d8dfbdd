"""What a dry run says of a training run before it starts."""

import shutil

import pytest

from t0repro.config.t5x.model import read_vocabularies
from t0repro.config.t5x.run import read_eval_run, read_infer_run, read_train_run
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.runs.batch_infer import infer
from t0repro.runs.evaluate_checkpoints import evaluate_checkpoints
from t0repro.runs.preflight import check_inference, check_training

from .tiny_gin import parsed, save_checkpoint

MACROS = (
    "MODEL_DIR = 'm'", "MIXTURE_OR_TASK_NAME = 'demo_train'", "TRAIN_STEPS = 4",
    "TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}", "USE_CACHED_TASKS = False",
    "BATCH_SIZE = 8", "trainer.Trainer.num_microbatches = 2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks."""
    import t0repro.tasks.demo  # noqa: F401


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of the model's parameters."""
    return save_checkpoint(tmp_path_factory.mktemp("model"), read_train_run(described()), 3)


def described(*bindings):
    return parsed("train", "pretrain", *MACROS, *bindings)


def said(*bindings):
    made, lines = described(*bindings), []
    check_training(read_train_run(made), read_vocabularies(made.program["model"], {}), lines.append)
    return lines


def test_each_check_gives_a_line(checkpoint):
    lines = said(f"utils.RestoreCheckpointConfig.path = '{checkpoint}'")
    assert lines[0] == "batch: 8 rows, microbatches of 4"
    assert "train: 14 tasks of demo_train with the split 'train'" in lines
    assert "train_eval: left out: no task of demo_train has a split 'validation'" in lines
    assert lines[-1].startswith("restore: ") and "52 parameters of 52 match" in lines[-1]


@pytest.mark.parametrize("place", ["utils.RestoreCheckpointConfig.path", "MODEL_DIR"])
def test_a_run_that_would_end_before_its_checkpoint_is_refused(checkpoint, place):
    path = checkpoint if place != "MODEL_DIR" else checkpoint.parent
    with pytest.raises(UserError, match="total_steps is 2, but the checkpoint is of step 3"):
        said(f"{place} = '{path}'", "TRAIN_STEPS = 2")


def test_mesh_tensorflows_checkpoint_in_model_dir_is_what_a_run_continues_from(
    checkpoint, tmp_path
):
    convert(checkpoint, tmp_path / "mtf", to="mtf")
    lines = said(f"MODEL_DIR = '{tmp_path}/mtf'")
    assert f"model_dir: training continues from {tmp_path}/mtf/model.ckpt-3 (mtf)" in lines


def test_a_map_of_names_says_what_is_drawn_anew(checkpoint):
    lines = said(
        f"utils.RestoreCheckpointConfig.path = '{checkpoint}'",
        "utils.RestoreCheckpointConfig.assignment_map = [('target/decoder/logits_dense/.*', None)]",
    )
    assert (
        "51 parameters of 52 match; initialized: target/decoder/logits_dense/kernel;"
        " not used: target/decoder/logits_dense/kernel"
    ) in lines[-1]


def test_all_that_is_wrong_is_reported_at_once(checkpoint):
    with pytest.raises(UserError) as error:
        said(
            f"utils.RestoreCheckpointConfig.path = '{checkpoint}'",
            "network.T5Config.vocab_size = 1280",
            "train_eval/utils.DatasetConfig.mixture_or_task_name = 'demo_trian'",
        )
    text = str(error.value)
    assert "The vocabulary has 1,4" in text and "'demo_train'" in text
    assert "of another shape: " in text
    assert "target/decoder/logits_dense/kernel (8, 1408) instead of (8, 1280)" in text
    with pytest.raises(UserError, match="No name of the model matches 'target/decodr/"):
        said(
            f"utils.RestoreCheckpointConfig.path = '{checkpoint}'",
            "utils.RestoreCheckpointConfig.assignment_map = [('target/decodr/.*', None)]",
        )


def test_query_kernels_of_the_other_scale_are_refused_by_every_run(checkpoint, tmp_path):
    model_dir = shutil.copytree(checkpoint.parent, tmp_path / "scaled")
    text = "from t5x.contrib.gpu.t5 import network\nnetwork.T5Config.scale_attn_logits = True\n"
    (model_dir / "config.gin").write_text(text)
    copy = model_dir / checkpoint.name
    message = f"(?s)trained with that division.*{copy}; {model_dir}/config.gin:2"
    with pytest.raises(UserError, match=message):
        said(f"utils.RestoreCheckpointConfig.path = '{copy}'")
    macros = ("MIXTURE_OR_TASK_NAME = 'demo_train'", "MIXTURE_OR_TASK_SPLIT = 'train'")
    macros += (f"CHECKPOINT_PATH = '{copy}'", "TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}")
    for mode, plan, start in (
        ("eval", read_eval_run, evaluate_checkpoints),
        ("infer", read_infer_run, infer),
    ):
        output = f"{mode.upper()}_OUTPUT_DIR = '{model_dir}'"  # where a config.gin is written too
        made = plan(parsed(mode, mode, *macros, output))
        with pytest.raises(UserError, match=message):
            check_inference(made, lambda line: None)
        with pytest.raises(UserError, match=message):
            start(made, describe=lambda: (model_dir / "config.gin").unlink())
        assert (model_dir / "config.gin").read_text() == text


def test_rows_that_are_not_cached_are_named_with_a_remedy_for_all_of_them():
    with pytest.raises(
        UserError, match=r"tasks of 'demo_train' are not cached \(14 of 14\)"
    ) as caught:
        said("USE_CACHED_TASKS = True")
    assert caught.value.what.endswith(" and 9 more.")
    assert "--mixture demo_train " in str(caught.value.fix)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("network.T5Config.vocab_size = 1280", "The vocabulary has 1,4"),
        ("TASK_FEATURE_LENGTHS = {'inputs': 64}", "The lengths lack targets"),
        ("TASK_FEATURE_LENGTHS = {'input': 64, 'targets': 8}", "lengths for input, which no task"),
        ("seqio.SentencePieceVocabulary.extra_ids = 7", "another vocabulary than the model's"),
        ("train/utils.DatasetConfig.split = 'dev'", "No task of 'demo_train' has a split 'dev'"),
    ],
)
def test_a_training_without_the_dry_run_is_refused_by_the_same_checks(tmp_path, binding, message):
    run = described(f"MODEL_DIR = '{tmp_path / 'model'}'", binding)
    with pytest.raises(UserError, match=message):
        check_training(
            read_train_run(run), read_vocabularies(run.program["model"], {}), lambda line: None
        )
    assert not (tmp_path / "model").exists()
