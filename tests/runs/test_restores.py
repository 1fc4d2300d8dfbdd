"""What T5X wrote, and its conversions, as INITIAL_CHECKPOINT_PATH and as CHECKPOINT_PATH."""

import json
import shutil

import jax
import numpy as np
import pytest
import seqio
import tensorflow as tf

from t0repro.config.t5x.gin_files import T5xInputs, parse
from t0repro.config.t5x.run import read_eval_run, read_infer_run, read_train_run
from t0repro.converters import convert
from t0repro.converters.restoring import open_start
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters
from t0repro.runs.batch_infer import infer
from t0repro.runs.restored_checkpoints import choose_checkpoints, open_restored
from t0repro.runs.start import start_training
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import new_train_state, to_flat_tree

from ..converters.checkpoint_files import assert_same_bits
from ..converters.test_t5x_layouts import T5X_FILES, written_by_t5x

pytestmark = written_by_t5x

TASK = "tokens_of_128"
# What T5X wrote: in both of its formats, and with scanned layers.
WRITTEN = {
    "tiny": "final_a_legacy/checkpoint_12",
    "square": "final_a_square_orbax/checkpoint_12",
    "scanned": "scalable_legacy/checkpoint_3",
}
FORMS = {model: ("t5x", "jax", "mtf", "hf") for model in WRITTEN} | {"scanned": ("t5x", "jax")}
# T5X's own model files; that of the scanned model was not kept.
MODEL_FILES = {model: f"include '{T5X_FILES}/{model}.gin'" for model in ("tiny", "square")} | {
    "scanned": """from t5x.examples.scalable_t5 import network
include 't5x/examples/scalable_t5/t5_1_1/small.gin'
network.T5Config:
  vocab_size = 1408
  dtype = 'float32'
  emb_dim = 192
  num_heads = 4
  num_encoder_layers = 2
  num_decoder_layers = 2
  head_dim = 64
  mlp_dim = 320
"""
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """A task of random tokens, for models whose vocabulary has 128 of them."""

    def rows(split, shuffle_files, seed=None):
        tokens = np.random.default_rng(0).integers(2, 128, (8, 2, 6)).astype(np.int32)
        return tf.data.Dataset.from_tensor_slices({"inputs": tokens[:, 0], "targets": tokens[:, 1]})

    feature = seqio.Feature(seqio.PassThroughVocabulary(128), add_eos=False)
    seqio.TaskRegistry.add(
        TASK,
        seqio.FunctionDataSource(rows, splits=("train", "test")),
        preprocessors=[],
        output_features={"inputs": feature, "targets": feature},
    )
    yield
    seqio.TaskRegistry.remove(TASK)


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """(model, form) -> path."""
    found = {}
    for model, name in WRITTEN.items():
        source = T5X_FILES / "ckpt" / name
        found[model, "t5x"] = source
        for form in FORMS[model][1:]:
            folder = tmp_path_factory.mktemp(f"{model}_{form}") / "converted"
            convert.convert(source, folder, form)
            found[model, form] = folder if form == "hf" else find(folder)
    return found


def find(folder):
    from t0repro.converters.finding import find_checkpoint

    return find_checkpoint(folder).path


@pytest.fixture(scope="module", autouse=True)
def model_files(tmp_path_factory):
    """T5X's model files, with tokens for a vocabulary."""
    folder = tmp_path_factory.mktemp("gin")
    for model in WRITTEN:
        (folder / f"{model}_tokens.gin").write_text(
            "from __gin__ import dynamic_registration\nimport seqio\n"
            f"{MODEL_FILES[model]}\n"
            "VOCABULARY = @seqio.PassThroughVocabulary()\n"
            "seqio.PassThroughVocabulary.size = 128\n"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def parsed(run_mode, run_file, model, *bindings):
    files = (f"{model}_tokens.gin", f"t5x/configs/runs/{run_file}.gin")
    shared = (
        "DROPOUT_RATE = 0.0",
        f"MIXTURE_OR_TASK_NAME = '{TASK}'",
        "TASK_FEATURE_LENGTHS = {'inputs': 6, 'targets': 6}",
    )
    return parse(T5xInputs(run_mode, files, (*shared, *bindings)))


def training(model, checkpoint, folder="unused"):
    return parsed(
        "train", "finetune", model, f"INITIAL_CHECKPOINT_PATH = '{checkpoint}'",
        f"MODEL_DIR = '{folder}'", "TRAIN_STEPS = 0", "train_script.train.relative_steps = 1",
        "USE_CACHED_TASKS = False", "BATCH_SIZE = 4", "RANDOM_SEED = 1",
        "train/utils.DatasetConfig.seed = 1",
        "train_script.train.train_eval_dataset_cfg = None",
        "train_script.train.infer_eval_dataset_cfg = None",
        "train_script.train.stats_period = 1",
    )  # fmt: skip


def inference(model, checkpoint, folder):
    return read_infer_run(
        parsed(
            "infer", "infer", model, f"CHECKPOINT_PATH = '{checkpoint}'",
            f"INFER_OUTPUT_DIR = '{folder}'", "infer.mode = 'score'",
            "utils.DatasetConfig.batch_size = 8",
            "utils.RestoreCheckpointConfig.dtype = 'float32'",
        )
    )  # fmt: skip


def start_of(config):
    """The tree that a training run starts from."""
    model = T5(config.model, config.dtypes)

    def fresh():
        return to_flat_tree(
            new_train_state(
                initial_parameters(model, jax.random.key(0)), make_optimizer(config.optimizer)
            )
        )

    return open_start(config, fresh)


@pytest.mark.parametrize("model", WRITTEN)
def test_training_and_evaluation_start_from_the_same_bits_in_every_form(forms, model):
    expected = load_any(forms[model, "t5x"])
    digests = set()
    for form in FORMS[model]:
        config = read_train_run(training(model, forms[model, form]))
        tree = start_of(config)
        wanted = {name for name in expected if name.startswith("target/") or form != "hf"}
        # Slots that are not in use are dummies, which formats may leave out.
        wanted = {name for name in wanted if expected[name].shape != (1,)}
        found = {n: np.asarray(tree[n]) for n in wanted}
        if form != "hf":  # Mesh TensorFlow's step is an int64; a state's is an int32
            found["state/step"] = found["state/step"].astype(np.int32)
        assert_same_bits({n: expected[n] for n in wanted}, found)
        plan = read_eval_run(
            parsed("eval", "eval", model, f"CHECKPOINT_PATH = '{forms[model, form]}'",
                   "EVAL_OUTPUT_DIR = 'unused'")
        )  # fmt: skip
        digests.add(open_restored(plan, choose_checkpoints(plan.restore)[0]).digest)
    assert len(digests) == 1


def test_every_run_of_t5xs_is_configured_as_config_json_says(forms, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(forms["tiny", "hf"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-5}))

    def evaluate(*bindings):
        run = parsed("eval", "eval", "tiny", f"CHECKPOINT_PATH = '{folder}'",
                     "EVAL_OUTPUT_DIR = 'unused'", *bindings)  # fmt: skip
        plan = read_eval_run(run)
        return open_restored(plan, choose_checkpoints(plan.restore)[0])

    names = "utils.RestoreCheckpointConfig.assignment_map = [(r'target/(.*)', r'target/\\1')]"
    for start in (
        lambda: start_of(read_train_run(training("tiny", folder))),
        evaluate,
        lambda: evaluate(names),
    ):
        with pytest.raises(UserError, match="config.json says 1e-05"):
            start()


@pytest.mark.slow
@pytest.mark.parametrize("model", WRITTEN)
def test_first_losses_and_scores_are_the_same_in_every_form(forms, model, tmp_path):
    losses, scores = {}, {}
    for form in FORMS[model]:
        folder = tmp_path / form
        run = training(model, forms[model, form], folder)
        start_training(read_train_run(run), describe=lambda state, devices: None)
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[form] = next(row["loss"] for row in rows if row["split"] == "train")
        (file,) = infer(inference(model, forms[model, form], folder / "scored"))
        scores[form] = [json.loads(line)["score"] for line in file.read_text().splitlines()]
    assert losses["t5x"] > 0 and set(losses.values()) == {losses["t5x"]}
    assert len(scores["t5x"]) == 8 and all(each == scores["t5x"] for each in scores.values())
