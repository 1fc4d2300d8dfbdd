import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.config.optimizer import ScheduleConfig
from t0repro.errors import UserError
from t0repro.training.schedules import SCHEDULES, make_schedule

TOTAL = 1000


def rates(name, steps, total=TOTAL, **arguments):
    schedule = make_schedule(ScheduleConfig(name, arguments, total))
    return jax.jit(jax.vmap(schedule))(jnp.array(steps, jnp.int32)).tolist()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("constant_learning_rate", {"learning_rate": 0.25}, lambda s: 0.25),
        ("constant", {"value": 0.5}, lambda s: 0.5),
        ("truncated_rsqrt", {"warmup_steps": 100}, lambda s: max(s, 100) ** -0.5),
        ("linear_warmup", {"steps_or_fraction": 200}, lambda s: min(1, s / 200)),
        ("linear_warmup", {"steps_or_fraction": 0.1}, lambda s: min(1, s / 100)),
        ("linear_decay", {"steps_or_fraction": 0.5}, lambda s: min(1, (TOTAL - s) / 500)),
        (
            "linear_decay_learning_rate",
            {"initial_lr": 0.1, "offset": 500},
            lambda s: 0.1 * min(1, (TOTAL - s) / 500),
        ),
        (
            "learning_rate_schedule_noam",
            {"warmup_steps": 10, "linear_decay_fraction": 0.1, "multiplier": 2.0, "offset": 100},
            lambda s: 2 / math.sqrt(max(s - 100, 10)) * min(1, (900 - (s - 100)) / 90),
        ),
        (
            "learning_rate_schedule_noam",
            {"warmup_steps": 10, "linear_decay_fraction": 0, "multiplier": 1.0, "offset": 0},
            lambda s: max(s, 10) ** -0.5,
        ),
        (
            "slanted_triangular",
            {"cut_fraction": 0.1, "ratio": 32, "max_learning_rate": 0.01, "start_step": 0},
            lambda s: 0.01 * (1 + (s / 100 if s < 100 else 1 - (s - 100) / 900) * 31) / 32,
        ),
        (
            "product_learning_rate",
            {
                "factors": [
                    0.5,
                    "truncated_rsqrt",
                    {"name": "linear_decay", "arguments": {"steps_or_fraction": 1.0}},
                ],
                "offset": 0,
            },
            lambda s: 0.5 * max(s, 10000) ** -0.5 * (TOTAL - s) / TOTAL,
        ),
    ],
)
def test_schedule_is_mesh_tensorflows_formula(name, arguments, expected):
    steps = [0, 1, 50, 99, 100, 101, 500, 950, 999]
    ours = rates(name, steps, **arguments)
    np.testing.assert_allclose(ours, [expected(step) for step in steps], rtol=1e-6)


def test_rates_of_late_steps_are_exact():
    # T0 starts at step 1,100,000, which float32 holds.
    (rate,) = rates("truncated_rsqrt", [1_100_001], warmup_steps=10_000)
    assert rate == pytest.approx(1_100_001**-0.5, rel=1e-6)


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(UserError, match="'constant_learning_rate'"):
        make_schedule(ScheduleConfig("constant_learning_rates", {}, TOTAL))


def test_unknown_factor_of_a_product_names_the_nearest():
    with pytest.raises(UserError, match="'linear_decay'"):
        rates("product_learning_rate", [0], factors=["linear_decays"], offset=0)


def test_argument_that_a_schedule_does_not_take_is_named():
    with pytest.raises(UserError, match="warmup"):
        make_schedule(ScheduleConfig("constant", {"warmup": 3}, TOTAL))


def test_every_schedule_of_mesh_tensorflow_0_1_21_is_there_with_adafactors_own_and_t5xs():
    assert sorted(SCHEDULES) == [
        "adafactor_default",
        "constant",
        "constant_learning_rate",
        "create_learning_rate_scheduler",
        "learning_rate_schedule_noam",
        "linear_decay",
        "linear_decay_learning_rate",
        "linear_warmup",
        "product_learning_rate",
        "slanted_triangular",
        "truncated_rsqrt",
    ]
