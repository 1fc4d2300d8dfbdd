"""A training as a gin file of the other dialect, read again, and what it says it cannot express."""

import dataclasses

import pytest

import tests.helpers.tiny_models as tiny
from t0repro.config.model import Arithmetic
from t0repro.config.t5x import gin_files, run
from t0repro.config.translation import translate
from t0repro.tasks.demo.datasets import VOCABULARY

from .t5x_trainings import config

TASK = "demo_synthetic_glue_mrpc_want_to_know"
SENTENCEPIECE = "seqio.SentencePieceVocabulary"


def written(folder, config, dialect):
    """The translation as a file, and the translation."""
    translation = translate(config, dialect)
    path = folder / f"{dialect}.gin"
    path.write_text("\n".join((*translation.header, *translation.bindings)) + "\n")
    return str(path), translation


def read_as_t5x(path):
    parsed = gin_files.parse(gin_files.T5xInputs("train", (path,)))
    assert not parsed.warnings
    return run.read_train_run(parsed)


def test_t5xs_file_of_a_run_makes_the_same_run_again(tmp_path):
    ours = config(
        "adafactor.Adafactor.beta1 = 0.0",
        "LOSS_NORMALIZING_FACTOR = 7",
        "train_script.train.eval_steps = 3",
        "train/utils.DatasetConfig.num_shards = 2",
        "train_eval/utils.DatasetConfig.split = 'test'",
        "utils.SaveCheckpointConfig.checkpoint_steps = [2, 5]",
        "utils.SaveCheckpointConfig.keep_period = 4",
        "train/utils.DatasetConfig.use_memory_cache = False",
        "train/utils.DatasetConfig.trim_output_features = False",
        "utils.RestoreCheckpointConfig.path = 'a'",
        "utils.RestoreCheckpointConfig.assignment_map = [('target/a', None)]",
        "RANDOM_SEED = 3",
    )
    path, translation = written(tmp_path, ours, "t5x")
    assert translation.missing == ()
    again = read_as_t5x(path)
    assert dataclasses.replace(again, provenance={}) == dataclasses.replace(ours, provenance={})


@pytest.mark.mtf
def test_mesh_tensorflows_own_parser_reads_a_run_of_t5xs_and_ours_reads_it_back(tmp_path):
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs

    ours = config(
        f"MIXTURE_OR_TASK_NAME = '{TASK}'",
        "USE_CACHED_TASKS = False",
        "network.T5Config.vocab_size = 1408",
        "network.T5Config.dtype = 'float32'",
        f"{SENTENCEPIECE}.sentencepiece_model_file = '{VOCABULARY}'",
        f"{SENTENCEPIECE}.extra_ids = 100",
        "train/utils.DatasetConfig.seed = 3",
        "train/utils.DatasetConfig.num_shards = 4",
        "trainer.Trainer.num_microbatches = 4",
        "LOSS_NORMALIZING_FACTOR = 'NUM_TOTAL_TARGET_TOKENS'",
        "models.EncoderDecoderModel.label_smoothing = 0.1",
        "utils.create_learning_rate_scheduler.factors = 'constant'",
        "utils.create_learning_rate_scheduler.base_learning_rate = 0.002",
        "adafactor.Adafactor.step_offset = 5",
    )
    path, _ = written(tmp_path, ours, "mtf")
    inputs = MeshInputs("m", gin_files=[path], module_imports=["t0repro.tasks.demo"])
    theirs = load(inputs).run
    assert theirs.schedule.name == "constant_learning_rate"
    for field in ("batch_size", "num_microbatches", "sequence_length", "dtypes", "train_steps"):
        assert getattr(theirs, field) == getattr(ours, field), field
    # Mesh TensorFlow has one rule of what is factored, where T5X may have more.
    assert theirs.optimizer == dataclasses.replace(ours.optimizer, factor_map=())
    assert theirs.model.loss_denominator is None
    # No binding of Mesh TensorFlow's asks for everything to be kept.
    assert theirs.model == dataclasses.replace(ours.model, arithmetic=Arithmetic(), recompute=None)
    path, _ = written(tmp_path, theirs, "t5x")
    again = read_as_t5x(path)
    expected = dataclasses.replace(ours.model.arithmetic, float32_attention_logits=True)
    assert again.model == dataclasses.replace(ours.model, arithmetic=expected)
    assert again.optimizer == ours.optimizer and again.dtypes == ours.dtypes
    assert again.vocabulary == ours.vocabulary and again.vocabulary_extra_ids == 100
    assert again.plan.train_data == ours.plan.train_data


def test_mesh_tensorflow_is_told_what_it_cannot_express():
    ours = config(
        "LOSS_NORMALIZING_FACTOR = 'AVERAGE_PER_SEQUENCE'",
        "utils.SaveCheckpointConfig.keep_period = 4",
        "utils.RestoreCheckpointConfig.path = 'a'",
        "utils.RestoreCheckpointConfig.assignment_map = [('target/a', None)]",
    )
    translation = translate(ours, "mtf")
    assert "d_model = 512" in translation.bindings
    assert "utils.run.batch_size = ('sequences_per_batch', 128)" in translation.bindings
    words = "; ".join(translation.missing)
    for part in ("plan.save.keep_period = 4", "plan.restore.assignment_map = ("):
        assert part in words
    for part in ("AVERAGE_PER_SEQUENCE", "z_loss_in_evaluation", "rsqrt_decay", "train_eval_data"):
        assert part in words
    assert "smoothing_spares_target" not in words  # nothing is smoothed


def test_a_run_of_mesh_tensorflows_in_t5xs_words():
    translation = translate(tiny.run_config("runs/a", 5), "t5x")
    expected = {
        "network.T5Config.emb_dim = 8",
        "models.EncoderDecoderModel.loss_normalizing_factor = 'NUM_TOTAL_TARGET_TOKENS'",
        "adafactor.Adafactor.beta1 = None",
        "utils.create_learning_rate_scheduler.base_learning_rate = 0.01",
        "network.T5Config.float32_attention_logits = True",
    }
    assert expected <= set(translation.bindings)
    assert "model.relative_attention_num_buckets = 8" in translation.missing
    arithmetic = [each for each in translation.missing if each.startswith("model.arithmetic.")]
    # T5X can bind one; smoothing and a prefix, to which two more belong, this run has not.
    assert len(arithmetic) == len(dataclasses.fields(Arithmetic)) - 3


@pytest.mark.mtf
@pytest.mark.parametrize(
    "schedule, words",
    [
        ("0.002", "create_learning_rate_scheduler.base_learning_rate = 0.002"),
        ("None", "schedule = adafactor_default"),
        (
            "[@schedules.linear_decay, 0.5, @slow/schedules.linear_decay]",
            "schedule = product_learning_rate",
        ),
    ],
)
def test_mesh_tensorflows_file_of_a_run_makes_the_same_run_again(tmp_path, schedule, words):
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs

    first = (
        f"MIXTURE_NAME = '{TASK}'",
        "mesh_train_dataset_fn.use_cached = False",
        "utils.run.mesh_shape = []",
        "utils.run.train_steps = 20",
        "utils.run.total_run_steps = 50",
        "utils.run.learning_rate_schedule = "
        + schedule.replace("schedules", "learning_rate_schedules"),
        "learning_rate_schedules.linear_decay.steps_or_fraction = 0.2",
        # Refused where nothing refers to the scope.
        *["slow/learning_rate_schedules.linear_decay.steps_or_fraction = 0.9"]
        * ("slow" in schedule),
        "AdafactorOptimizer.decay_rate = 0.9",
        "run.init_checkpoint = 'elsewhere'",
        "tpu_estimator_model_fn.init_variable_filter = 'encoder'",
    )
    files, modules = ["dataset.gin", "models/t5.1.1.base.gin"], ["t0repro.tasks.demo"]
    ours = load(
        MeshInputs("m", gin_files=files, gin_params=list(first), module_imports=modules)
    ).run
    path, translation = written(tmp_path, ours, "mtf")
    assert translation.missing == ()
    again = load(MeshInputs("m", gin_files=[path], module_imports=modules)).run
    assert again.schedule == ours.schedule and again.schedule.total_train_steps == 50
    assert again.optimizer == ours.optimizer and again.plan == ours.plan
    assert again.plan.restore.variable_filter == "encoder"
    other = translate(ours, "t5x")
    for word in (words, "optimizer.decay_rate = 0.9"):
        assert any(word in line for line in (*other.bindings, *other.missing))


def test_patterns_of_names_are_not_passed_over():
    run_config = tiny.run_config("runs/a", 5)
    optimizer = dataclasses.replace(run_config.optimizer, frozen=("decoder/decoder_norm/scale",))
    run_config = dataclasses.replace(run_config, optimizer=optimizer)
    for dialect in ("mtf", "t5x"):
        assert any("optimizer.frozen" in line for line in translate(run_config, dialect).missing)


def test_factor_rules_of_parameters_are_not_passed_over():
    run_config = config()
    rules = (("embedding", "unfactored"), (".*", "heuristic"))
    optimizer = dataclasses.replace(run_config.optimizer, factor_map=rules)
    ruled = dataclasses.replace(run_config, optimizer=optimizer)
    for dialect in ("mtf", "t5x"):
        assert any("factor_map" in line for line in translate(ruled, dialect).missing)
        assert not any("factor_map" in line for line in translate(run_config, dialect).missing)
