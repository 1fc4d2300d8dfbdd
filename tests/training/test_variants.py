"""Models and options beside T5's own, each trained a few steps by both stacks from one start."""

import dataclasses

import numpy as np
import pytest

from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.optimizer import AdamWeightDecayConfig
from t0repro.evaluation.engine import score_examples
from t0repro.model.t5 import T5
from t0repro.parameters import naming
from t0repro.parity.jax_run import run_jax
from t0repro.parity.mesh_jobs import MeshJob, run_mesh, save_batches
from t0repro.training.train_state import parameters_from_flat_tree

from .mesh_reference import packed_batch, unpacked_batch

pytestmark = pytest.mark.mtf

PARAMS = (
    "MIXTURE_NAME = 'demo_train'",
    "utils.run.mesh_shape = []",
    "utils.run.layout_rules = []",
    "run.train_steps = 100",
    "run.batch_size = 4",
    "run.sequence_length = {'inputs': 16, 'targets': 8}",
    "get_variable_dtype.master_dtype = 'float32'",  # what checkpoints hold
    "dropout_rate = 0.0",
    "num_layers = 2",
    "num_heads = 2",
    "d_kv = 64",
    "d_model = 128",
    "d_ff = 160",
)
FACTORS = (
    "run.learning_rate_schedule = [0.5, @learning_rate_schedules.truncated_rsqrt]",
    "truncated_rsqrt.warmup_steps = 100",
)
DELIMITED = ("run.model_type = 'delimited_lm'", "Unitransformer.loss_on_targets_only = True")
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model gin with bindings, and whether its rows are packed."""

    name: str
    gin: str
    params: tuple[str, ...]
    packed: bool
    inputs: bool = True


VARIANTS = [
    Variant(
        "T5 1.1 gated by swish, with another epsilon in its norms",
        "t5.1.1.small",
        ("DenseReluDense.activation = ['swish', 'linear']", "sublayer_rms_norm.epsilon = 0.01"),
        packed=True,
    ),
    Variant(
        "a position bias in each layer, as in umT5",
        "t5.1.1.small",
        ("SelfAttention.relative_attention_type = 'bias'",),
        packed=False,
    ),
    Variant(
        "lm, packed, in microbatches, with a list of factors",
        "lm_v1",
        (*FACTORS, "serialize_num_microbatches.tokens_per_microbatch_per_replica = 32"),
        packed=True,
        inputs=False,
    ),
    Variant("lm with an unpadded row", "lm_v1", FACTORS, packed=False, inputs=False),
    Variant("delimited lm, full attention, packed", "lm_v1_ifa", (*DELIMITED, *FACTORS), True),
    Variant("delimited lm, full attention", "lm_v1_ifa", (*DELIMITED, *FACTORS), False),
    Variant(
        "shared towers, recomputed, Adam with weight decay",
        "bi_v1_shared",
        (
            "LayerStack.recompute_grads = True",
            "run.optimizer = @optimize.AdamWeightDecayOptimizer",
            "AdamWeightDecayOptimizer.weight_decay_rate = 0.01",
            "AdamWeightDecayOptimizer.exclude_from_weight_decay = ['norm', 'self_attention/']",
            "run.learning_rate_schedule = 0.001",
        ),
        packed=False,
    ),
    Variant(
        "T5 1.0's legacy sublayers, decoder trained alone, Adafactor's own rate",
        "t5.1.0.small",
        (
            "LayerStack.dropout_rate = 0.0",
            "LayerStack.norm_epsilon = 1e-6",
            "run.variable_filter = '^decoder/'",
            "AdafactorOptimizer.exclude_from_parameter_scale = ['layer_norm']",
            "run.learning_rate_schedule = None",
        ),
        packed=True,
    ),
]


SCORED = "lm with an unpadded row"


def batches(variant):
    generator = np.random.default_rng(1)
    make = packed_batch if variant.packed else unpacked_batch
    found = [make(generator, 4, 16, 8) for _ in range(STEPS)]
    if variant.inputs:
        return found
    return [{name: x for name, x in b.items() if name.startswith("targets")} for b in found]


def inputs(variant):
    return MeshInputs(
        "a_model_dir",
        ("dataset.gin", f"models/{variant.gin}.gin"),
        (*PARAMS, *variant.params),
        module_imports=("t0repro.tasks.demo",),
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Mesh TensorFlow's results of all variants, computed in one process."""
    folder = tmp_path_factory.mktemp("variants")
    jobs = []
    for index, variant in enumerate(VARIANTS):
        path = save_batches(folder / f"{index}.npz", batches(variant))
        out, scored = str(folder / str(index)), path if variant.name == SCORED else None
        jobs.append(MeshJob(out, inputs(variant), path, snapshots=(1,), scored=scored))
    results = run_mesh(jobs)
    return {variant.name: result for variant, result in zip(VARIANTS, results, strict=True)}


def read_tree(prefix, model):
    """A Mesh TensorFlow checkpoint by T5X's flat names, of any variant."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(prefix)
    paths = {name: path for path, name in model.mesh_variables().items()}
    shapes, tree = reader.get_variable_to_shape_map(), {}
    for name in shapes:
        variable, slot = naming.split_mtf_slot(name)
        if name == naming.MTF_STEP:
            tree[naming.STEP] = reader.get_tensor(name)
        elif slot is None:
            tree[naming.PARAMETERS + paths[variable]] = reader.get_tensor(name)
        else:
            slot = naming.slot_from_mtf(slot, shapes[variable])
            tree[naming.slot_key(paths[variable], slot)] = reader.get_tensor(name)
    return tree


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_losses_and_the_state_after_a_step_agree_with_mesh_tensorflow(mesh, variant):
    config = dialect.load(inputs(variant)).run
    theirs = mesh[variant.name]
    start = read_tree(theirs.checkpoint(0), config.model)
    ours = run_jax(config, batches(variant), start, snapshots=(1,))
    rates = theirs.arrays["learning_rates"]  # NaN where the schedule is not a function
    np.testing.assert_allclose(np.where(np.isnan(rates), rates, ours.learning_rates), rates, 1e-6)
    np.testing.assert_allclose(ours.losses[0], theirs.arrays["losses"][0], rtol=1e-5)
    np.testing.assert_allclose(ours.losses, theirs.arrays["losses"], rtol=1e-4)
    adam = isinstance(config.optimizer, AdamWeightDecayConfig)
    expected = read_tree(theirs.checkpoint(1), config.model)
    moved = 0
    for key, x in expected.items():
        if key == naming.STEP:
            continue
        _, slot = naming.split_key(key)
        mine = ours.trees[1][key]
        rms = root_mean_square(x)
        # Adam divides a gradient by its own size: where the gradient is rounding alone, the
        # difference is of the learning rate's size. Those entries are few.
        allowed = 1e-4 if adam and slot is None else 1e-5
        assert root_mean_square(mine - x) <= allowed * rms, key
        moved += slot is None and not np.array_equal(x, start[key])
    frozen = config.optimizer.frozen
    trained = [key for key in start if key.startswith(naming.PARAMETERS)]
    assert moved == len(trained) - len(frozen)
    assert bool(frozen) == ("variable_filter" in str(variant.params))


def test_a_language_model_scores_texts_as_mesh_tensorflow_does(mesh):
    (variant,) = [each for each in VARIANTS if each.name == SCORED]
    config, theirs = dialect.load(inputs(variant)).run, mesh[SCORED]
    params = parameters_from_flat_tree(read_tree(theirs.checkpoint(0), config.model))
    # Mesh TensorFlow's `lm` scores the whole text, which is a choice's score and its input's.
    texts = [text[text > 0] for batch in batches(variant) for text in batch["targets"]]
    cuts = [len(text) // 2 for text in texts]
    halves = [
        {"inputs": text[:cut], "targets": text[cut:]} for text, cut in zip(texts, cuts, strict=True)
    ]
    firsts = [{"inputs": [], "targets": text[:cut]} for text, cut in zip(texts, cuts, strict=True)]
    scores = score_examples(params, T5(config.model, config.dtypes), [*halves, *firsts], None)
    np.testing.assert_allclose(
        scores[: len(texts)] + scores[len(texts) :], theirs.arrays["scores"], rtol=1e-5
    )


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))
