"""Adafactor's maps by parameter and MultiOptimizer, from a T5X gin file to a TrainRun."""

import jax.numpy as jnp
import optax
import pytest

from t0repro.config.optimizer import MultiOptimizerConfig
from t0repro.config.run import TrainRun
from t0repro.errors import UserError
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.training.optimizers import make_optimizer

from ..t5x_trainings import MODEL, PRETRAIN, config

pytestmark = pytest.mark.filterwarnings("ignore:.flax.traverse_util.Traversal:DeprecationWarning")

FACTORED = """
adafactor.Adafactor.logical_factor_rules = None
adafactor.Adafactor.factor_map = @adafactor.HParamMap()
"""
MAP = "adafactor.Adafactor.factor_map = @adafactor.HParamMap()\nadafactor.HParamMap.rules = "
SEVERAL = """
OPTIMIZER = @optimizers.MultiOptimizer()
optimizers.MultiOptimizer.traversals_and_optimizers = [
    (@kernels/traverse_util.ModelParamTraversal(), @kernels/adafactor.Adafactor()),
    (@scales/traverse_util.ModelParamTraversal(), @scales/adafactor.Adafactor()),
]
kernels/traverse_util.ModelParamTraversal.filter_fn = @my_filters.kernels
scales/traverse_util.ModelParamTraversal.filter_fn = @my_filters.scales
scales/adafactor.Adafactor.multiply_by_parameter_scale = False
"""
FILTERS = """
def kernels(path, _):
    return path.endswith("/kernel")


def scales(path, _):
    return path.endswith("/scale")


def both(path, _):
    return True
"""


def from_file(folder, text):
    path = folder / "run.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nimport my_filters\n"
        "import optax\nfrom flax import traverse_util\n"
        "from t5x import adafactor\nfrom t5x import optimizers\nfrom t5x import utils\n"
        f"include '{MODEL}'\ninclude '{PRETRAIN}'\n{text}\n"
    )
    return config(files=[str(path)])


@pytest.fixture(autouse=True)
def filters(tmp_path, monkeypatch):
    (tmp_path / "my_filters.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)


def test_t5xs_adafactor_has_a_rule_for_every_parameter():
    assert config().optimizer.factor_map == ALL_HEURISTIC


def test_a_map_of_scales_names_the_parameters_that_are_not_scaled(tmp_path):
    ours = from_file(
        tmp_path,
        "adafactor.Adafactor.multiply_by_parameter_scale = @adafactor.HParamMap()\n"
        "adafactor.HParamMap.rules = [('embedding|logits', False), ('.*', True)]",
    )
    assert ours.optimizer.multiply_by_parameter_scale is True
    assert set(ours.optimizer.exclude_from_parameter_scale) == {
        "token_embedder/embedding",
        "decoder/relpos_bias/rel_embedding",
        "encoder/relpos_bias/rel_embedding",
        "decoder/logits_dense/kernel",
    }
    assert "run.gin" in ours.provenance["optimizer.exclude_from_parameter_scale"]
    assert TrainRun.from_json(ours.to_json()) == ours


def test_a_factor_map_is_kept_and_yields_to_logical_rules(tmp_path):
    rules = "[('embedding', None), ('kernel', ('ROW', 'col')), ('.*', 'heuristic')]"
    ours = from_file(tmp_path, FACTORED + f"adafactor.HParamMap.rules = {rules}")
    assert ours.optimizer.factor_map == (
        ("embedding", "unfactored"),
        ("kernel", "row column"),
        (".*", "heuristic"),
    )
    assert TrainRun.from_json(ours.to_json()) == ours
    logical = (
        "adafactor.Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules()\n"
    )
    both = from_file(tmp_path, logical + MAP + rules)
    assert both.optimizer.factor_map == ALL_HEURISTIC


def test_each_optimizer_trains_its_parameters_and_the_rest_stay(tmp_path):
    ours = from_file(tmp_path, SEVERAL)
    assert isinstance(ours.optimizer, MultiOptimizerConfig)
    kernels, scales = ours.optimizer.parts
    assert all(path.endswith("/kernel") for path in kernels.paths) and len(kernels.paths) > 9
    assert all(path.endswith("/scale") for path in scales.paths) and len(scales.paths) > 9
    assert kernels.optimizer.multiply_by_parameter_scale
    assert not scales.optimizer.multiply_by_parameter_scale
    assert TrainRun.from_json(ours.to_json()) == ours


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FACTORED + "adafactor.HParamMap.rules = [('kernel', None)]", "no rule is for"),
        (FACTORED + "adafactor.HParamMap.rules = [('(', None)]", "not a regular expression"),
        (FACTORED + "adafactor.HParamMap.rules = [('.*', ('row', 'across'))]", "a word for each"),
        (FACTORED + "adafactor.HParamMap.rules = [('.*', ('row', 'column'))]", "for 2 axes"),
        (FACTORED + "adafactor.HParamMap.rules = [('.*', 'heuristic')]\n"
         "adafactor.Adafactor.factored = False", "nothing to map"),
        (SEVERAL + "scales/traverse_util.ModelParamTraversal.filter_fn = @my_filters.both",
         "two optimizers"),
        ("OPTIMIZER = @optimizers.MultiOptimizer()\n"
         "optimizers.MultiOptimizer.traversals_and_optimizers = [(1, @adafactor.Adafactor())]",
         "does not select parameters"),
        ("OPTIMIZER = @optimizers.MultiOptimizer()\n"
         "optimizers.MultiOptimizer.traversals_and_optimizers = [(1, @optax.sgd())]\n"
         "optax.sgd.learning_rate = 0.1", "must be Adafactor"),
    ],
)  # fmt: skip
def test_what_no_optimizer_can_do_is_refused_with_its_place(tmp_path, text, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        from_file(tmp_path, text)
    assert "run.gin" in (caught.value.where or "")


CHAIN = "OPTIMIZER = @optimizers.chain()\noptimizers.chain.transformations = "


def rates_of(config: TrainRun, steps: int) -> list[float]:
    """The rates of the chain's updates, from its updates of a parameter by a gradient of 1."""
    optimizer = make_optimizer(config.optimizer)
    params = {"w": jnp.ones(1)}
    state, rates = optimizer.init(params), []
    for step in range(steps):
        updates, state = optimizer.update(
            {"w": jnp.ones(1)}, state, params, step=jnp.int32(step), learning_rate=jnp.float32(0)
        )
        rates.append(-float(updates["w"][0]))
    return rates


def test_a_chain_takes_t5xs_own_schedule(tmp_path):
    text = (
        f"{CHAIN}[@optax.sgd()]\n"
        "optax.sgd.learning_rate = @utils.create_learning_rate_scheduler()\n"
        "utils.create_learning_rate_scheduler:\n"
        "  factors = 'constant * linear_warmup'\n  base_learning_rate = 0.5\n  warmup_steps = 4\n"
    )
    config = from_file(tmp_path, text)
    assert TrainRun.from_json(config.to_json()) == config
    # T5X's factors by hand; the rate is never 0.
    assert rates_of(config, 6) == pytest.approx([1e-8, 0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_chains_schedule_is_in_its_ranges(tmp_path):
    text = (
        f"{CHAIN}[@optax.sgd()]\n"
        "optax.sgd.learning_rate = @utils.create_learning_rate_scheduler()\n"
        "utils.create_learning_rate_scheduler:\n  factors = 'linear_warmup'\n  warmup_steps = 0\n"
    )
    with pytest.raises(UserError, match="warmup_steps is 0") as error:
        from_file(tmp_path, text)
    assert "run.gin:" in str(error.value.where)


def test_boundaries_of_a_schedule_are_steps_though_json_has_only_texts_as_keys(tmp_path):
    text = (
        f"{CHAIN}[@optax.sgd()]\noptax.sgd.learning_rate = @optax.piecewise_constant_schedule()\n"
        "optax.piecewise_constant_schedule.init_value = 0.5\n"
        "optax.piecewise_constant_schedule.boundaries_and_scales = {2: 0.5, 4: 0.1}\n"
    )
    config = TrainRun.from_json(from_file(tmp_path, text).to_json())
    peer = optax.piecewise_constant_schedule(0.5, {2: 0.5, 4: 0.1})
    assert rates_of(config, 6) == pytest.approx([float(peer(step)) for step in range(6)])
