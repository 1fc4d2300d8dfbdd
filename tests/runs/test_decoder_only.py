"""T5X's decoder-only model in the modes that generate and score: eval, infer and in training."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import seqio
import tensorflow as tf

from t0repro.cli.bodies.training import start
from t0repro.config.t5x.gin_files import T5xInputs, parse
from t0repro.config.t5x.model import read_vocabularies
from t0repro.config.t5x.run import read_eval_run, read_infer_run, read_train_run
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.evaluation.evaluator import model_features
from t0repro.runs import batch_infer
from t0repro.runs.evaluate_checkpoints import evaluate_checkpoints
from t0repro.runs.restored_checkpoints import open_restored
from t0repro.tasks.demo.datasets import VOCABULARY

from ..config.t5x_trainings import BIDIRECTIONAL, DECODER_ONLY, PASSED_THROUGH
from ..helpers.t5x_decoder import continue_by_hand, score_by_hand
from .tiny_gin import save_checkpoint

GENERATED = "demo_synthetic_glue_mrpc_want_to_know"
RANKED = f"{GENERATED}_score_eval"
PASSED = "passed_through"
LENGTHS = {"inputs": 60, "targets": 8}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's tasks, a mixture of two kinds, and a task that gives the model's features."""
    import t0repro.tasks.demo  # noqa: F401

    seqio.MixtureRegistry.add("decoder_only_kinds", [(GENERATED, 1), (RANKED, 1)])
    ranked = seqio.get_mixture_or_task(RANKED).get_dataset(LENGTHS, "validation", shuffle=False)

    def halve_weights(made):
        weights = made["decoder_loss_weights"] / 2
        return {**made, "decoder_loss_weights": weights, "targets": made["decoder_target_tokens"]}

    def features(split, shuffle_files, seed=None):
        return seqio.DecoderFeatureConverter(pack=False)(ranked, LENGTHS).map(halve_weights)

    def count_scores(targets, scores):
        return {"count": len(scores)}

    names = ("target_tokens", "input_tokens", "causal_attention", "loss_weights")
    declared = {f"decoder_{name}": tf.int32 for name in names}
    # SeqIO's Evaluator reads the targets of any task.
    declared |= {"decoder_loss_weights": tf.float64, "targets": tf.int32}
    vocabulary = seqio.get_mixture_or_task(RANKED).output_features["targets"].vocabulary
    seqio.TaskRegistry.add(
        PASSED,
        source=seqio.FunctionDataSource(features, splits=["validation"]),
        preprocessors=[],
        output_features={
            name: seqio.Feature(vocabulary, add_eos=False, dtype=dtype)
            for name, dtype in declared.items()
        },
        metric_fns=[count_scores],
    )
    yield
    seqio.MixtureRegistry.remove("decoder_only_kinds")
    seqio.TaskRegistry.remove(PASSED)


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "prefix"])
def model(request, tmp_path_factory):
    """The model's gin file, a checkpoint, the parameters and whether inputs attend both ways."""
    folder = tmp_path_factory.mktemp("model")
    text = DECODER_ONLY.split("include ")[0].replace(
        "seqio.ByteVocabulary()", "seqio.SentencePieceVocabulary()"
    )
    lines = [
        "network.TransformerConfig.vocab_size = 1408",
        f"seqio.SentencePieceVocabulary.sentencepiece_model_file = '{VOCABULARY}'",
        "seqio.SentencePieceVocabulary.extra_ids = 100",
        "decoding.temperature_sample.temperature = 0.0",
        *[BIDIRECTIONAL] * request.param,
    ]
    gin = folder / "model.gin"
    gin.write_text("\n".join([text, "from t5x import decoding", *lines]))
    made = SimpleNamespace(gin=gin, folder=folder, both_ways=request.param)
    made.checkpoint = save_checkpoint(folder, eval_plan(made, "x"), 3)
    plan = eval_plan(made, folder)
    made.params = open_restored(plan, find_checkpoint(str(made.checkpoint))).params
    return made


def eval_plan(made, output, *bindings, name="decoder_only_kinds"):
    run = "t5x/configs/runs/eval.gin"
    given = (
        f"MIXTURE_OR_TASK_NAME = '{name}'", f"CHECKPOINT_PATH = '{made.folder}/checkpoint_3'",
        f"EVAL_OUTPUT_DIR = '{output}'", "MIXTURE_OR_TASK_SPLIT = 'validation'",
        "DROPOUT_RATE = 0.0", "seqio.Evaluator.num_examples = 6",
        "utils.DatasetConfig.batch_size = 4", *bindings,
    )  # fmt: skip
    return read_eval_run(parse(T5xInputs("eval", (str(made.gin), run), given)))


def infer_plan(made, output, mode, *bindings, name=GENERATED, gin=None):
    run = "t5x/configs/runs/infer.gin"
    given = (
        f"MIXTURE_OR_TASK_NAME = '{name}'", f"CHECKPOINT_PATH = '{made.folder}/checkpoint_3'",
        f"INFER_OUTPUT_DIR = '{output}'", "MIXTURE_OR_TASK_SPLIT = 'validation'",
        f"TASK_FEATURE_LENGTHS = {LENGTHS}", "DROPOUT_RATE = 0.0", f"infer.mode = '{mode}'",
        "utils.DatasetConfig.batch_size = 4", "utils.RestoreCheckpointConfig.dtype = 'float32'",
        *bindings,
    )  # fmt: skip
    return read_infer_run(parse(T5xInputs("infer", (str(gin or made.gin), run), given)))


def examples_of(name, count=None):
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        LENGTHS, "validation", shuffle=False, use_cached=False, seed=42
    )
    return list(dataset.take(count or -1).as_numpy_iterator())


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(tokens):
    vocabulary = seqio.get_mixture_or_task(GENERATED).output_features["targets"].vocabulary
    return vocabulary.decode([int(token) for token in tokens])


def whole_examples(name, count):
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        None, "validation", shuffle=False, use_cached=False, seed=42
    )
    return list(dataset.take(count).as_numpy_iterator())


def test_eval_generates_and_scores_as_t5x_does(model, tmp_path):
    plan = eval_plan(model, tmp_path)
    assert plan.decoding.method == "temperature_sample" and plan.data.converter == "decoder"
    assert evaluate_checkpoints(plan)[3].keys() == {GENERATED, RANKED}
    folder = tmp_path / "inference_eval"
    rows, scored = (rows_of(folder / f"{name}-000003.jsonl") for name in (GENERATED, RANKED))
    evaluated = {name: whole_examples(name, 6) for name in (GENERATED, RANKED)}
    # A row has room for the longest of all examples' inputs and for that of their targets.
    room = sum(
        max(len(each[name]) for examples in evaluated.values() for each in examples)
        for name in ("inputs", "targets")
    )
    assert len(rows) == len(scored) == 6
    for row, example in zip(rows, evaluated[GENERATED], strict=True):
        output = continue_by_hand(model.params, example["inputs"], room, model.both_ways)
        assert row["output"] == text_of(output)
    expected = score_by_hand(model.params, evaluated[RANKED], model.both_ways)
    np.testing.assert_allclose([row["score"] for row in scored], expected, rtol=2e-5)


@pytest.mark.parametrize("name", [GENERATED, RANKED])
def test_examples_read_without_seqio_have_its_converters_features(name):
    dataset = seqio.get_mixture_or_task(name).get_dataset(LENGTHS, "validation", shuffle=False)
    bare = [{"inputs": np.arange(2, 5, dtype=np.int32), "targets": np.zeros(0, np.int32)}]
    empty = tf.data.Dataset.from_tensors(bare[0])
    for made, examples in ((dataset, list(dataset.as_numpy_iterator())), (empty, bare)):
        converted = seqio.DecoderFeatureConverter(pack=False)(made, LENGTHS)
        for example, theirs in zip(examples, converted.as_numpy_iterator(), strict=True):
            ours = model_features(example, LENGTHS, "decoder")
            assert ours.keys() == theirs.keys()
            for feature, value in theirs.items():
                np.testing.assert_array_equal(ours[feature], value, feature)


@pytest.mark.parametrize("mode", ["predict_with_aux", "score"])
def test_infer_writes_what_t5x_does(model, mode, tmp_path):
    name = RANKED if mode == "score" else GENERATED
    (path,) = batch_infer.infer(infer_plan(model, tmp_path, mode, name=name))
    rows, examples = rows_of(path), examples_of(name)
    assert len(rows) == len(examples) > 8
    if mode == "score":
        expected = score_by_hand(model.params, examples, model.both_ways)
        np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=2e-5)
        return
    for row, example in zip(rows[:8], examples, strict=False):
        output = continue_by_hand(
            model.params, example["inputs"], sum(LENGTHS.values()), model.both_ways
        )
        # At temperature 0 the only token that is left has probability 1.
        assert row["prediction"] == text_of(output) and row["aux"] == {"scores": 0.0}


def test_features_that_a_task_passes_through_are_scored_by_their_weights(model, tmp_path):
    gin = tmp_path / "passed.gin"
    gin.write_text(f"{model.gin.read_text()}\n{PASSED_THROUGH}\n")
    passed = infer_plan(model, tmp_path / "score", "score", name=PASSED, gin=gin)
    assert passed.data.converter == "pass_through"
    (path,) = batch_infer.infer(passed)
    expected = score_by_hand(model.params, examples_of(RANKED), model.both_ways)
    np.testing.assert_allclose([row["score"] for row in rows_of(path)], 0.5 * expected, rtol=2e-5)
    plans = [
        infer_plan(model, tmp_path / "passed", "predict", name=PASSED, gin=gin),
        infer_plan(model, tmp_path / "made", "predict", name=RANKED),
    ]
    passed, made = (
        [row["prediction"] for path in batch_infer.infer(plan) for row in rows_of(path)]
        for plan in plans
    )
    assert passed == made and len(set(made)) > 1


@pytest.mark.parametrize("mode", ["predict", "score"])
def test_outputs_and_prefixes_need_a_length_of_inputs(model, mode, tmp_path):
    lacking = "TASK_FEATURE_LENGTHS = {'targets': 8}"
    if mode == "score" and not model.both_ways:
        assert infer_plan(model, tmp_path, mode, lacking).data.sequence_length == {"targets": 8}
        return
    with pytest.raises(UserError, match="examples are targets alone"):
        infer_plan(model, tmp_path, mode, lacking)


@pytest.mark.parametrize("passed", [False, True])
def test_a_training_run_evaluates_loss_outputs_and_scores(model, passed, tmp_path):
    """With EVAL_PERIOD 1, the last evaluation is of the last checkpoint."""
    name = PASSED if passed else "decoder_only_kinds"
    lines = [
        "import __main__ as train_script",
        "from t5x import utils",
        "include 't5x/configs/runs/pretrain.gin'",
        "DROPOUT_RATE = 0.0",
        f"MIXTURE_OR_TASK_NAME = '{name}'",
        f"TASK_FEATURE_LENGTHS = {LENGTHS}",
        f"MODEL_DIR = '{tmp_path}/run'",
        "TRAIN_STEPS = 2",
        "EVAL_PERIOD = 2",
        "EVAL_STEPS = 1",
        "BATCH_SIZE = 4",
        "USE_CACHED_TASKS = False",
        "utils.DatasetConfig.split = 'validation'",
        "train/utils.DatasetConfig.split = 'validation'",
        "train/utils.DatasetConfig.pack = False",
        "train_eval/utils.DatasetConfig.split = 'validation'",
        "train_eval/utils.DatasetConfig.pack = False",
        "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()",
        "train_script.train.inference_evaluator_cls = @seqio.Evaluator",
        f"infer_eval/utils.DatasetConfig.mixture_or_task_name = '{name}'",
        "infer_eval/utils.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS",
        "infer_eval/utils.DatasetConfig.split = 'validation'",
        "infer_eval/utils.DatasetConfig.batch_size = 4",
        "infer_eval/utils.DatasetConfig.shuffle = False",
        "infer_eval/utils.DatasetConfig.seed = 0",
        "seqio.Evaluator.num_examples = 4",
        "seqio.Evaluator.logger_cls = [@seqio.TensorBoardLogger, @seqio.JSONLogger]",
        *[PASSED_THROUGH] * passed,
    ]
    gin = tmp_path / "run.gin"
    gin.write_text("\n".join([model.gin.read_text(), *lines]))
    parsed = parse(T5xInputs("train", (str(gin),)))
    start(
        parsed.gin_text,
        read_train_run(parsed),
        read_vocabularies(parsed.program["model"], {}),
        False,
    )
    rows = rows_of(tmp_path / "run/metrics.jsonl")
    splits = {row["split"] for row in rows if row["step"] == 2}
    evaluated = {PASSED} if passed else {GENERATED, RANKED}
    assert {f"training_eval/{task}" for task in evaluated} <= splits
    assert {f"inference_eval/{task}" for task in evaluated} <= splits
    plan = eval_plan(model, tmp_path / "eval", name=RANKED)
    trained = open_restored(plan, find_checkpoint(f"{tmp_path}/run/checkpoint_2")).params
    scored = rows_of(tmp_path / f"run/inference_eval/{PASSED if passed else RANKED}-000002.jsonl")
    expected = score_by_hand(trained, examples_of(RANKED, 4), model.both_ways)
    np.testing.assert_allclose(
        [row["score"] for row in scored], (0.5 if passed else 1) * expected, rtol=2e-5
    )
