"""What is shown of auxiliary jobs."""

from t0repro.jobs.journal import Point, PointProgress, curves, rows


def test_a_metric_that_is_not_finite_is_in_the_table_and_not_in_the_curve():
    values = {1: float("nan"), 2: 0.5, 3: float("inf"), 4: 0.75}
    status = {
        Point(step, "m"): PointProgress("succeeded", metric=("loss", value))
        for step, value in values.items()
    }
    assert [row[-1] for row in rows(status)] == ["loss nan", "loss 0.5", "loss inf", "loss 0.75"]
    assert curves(status) == ["m: loss  ▁█  0.5 to 0.75, steps 2 to 4"]
