"""What `t0repro parity` makes of two stacks' results: these are made by hand."""

import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from t0repro.config.mtf.parser import MeshInputs
from t0repro.evaluation.judge import Judge
from t0repro.parity import report, run
from t0repro.parity.jax_run import StackResult
from t0repro.tasks.metrics import postprocess

TOKENS = np.array([2, 5])  # of each scored row
TENSOR = np.array([[3.0, -1.0], [0.5, 0.0]])
REFERENCE = StackResult(
    losses=np.linspace(6.0, 4.0, 25),
    learning_rates=np.ones(25),
    trees={step: {"target/kernel": TENSOR, "unused": np.zeros(1)} for step in (0, 1, 25)},
    activations={"encoder": TENSOR},
    gradients={"kernel": TENSOR},
    token_losses=TENSOR,
    scores=np.array([-4.0, -9.0]),
)


def larger(name, by, at=slice(None)):
    """The reference with a part of one result larger."""
    value = np.array(getattr(REFERENCE, name), copy=True)
    value[at] = by(value[at])
    return dataclasses.replace(REFERENCE, **{name: value})


def larger_tensor(name, by):
    return dataclasses.replace(
        REFERENCE, **{name: {key: by(TENSOR) for key in getattr(REFERENCE, name)}}
    )


def other_tree(step, by):
    """The reference whose largest entry after a step is another."""
    tensor = TENSOR.copy()
    tensor[0, 0] = by(tensor[0, 0])
    trees = {**REFERENCE.trees, step: {**REFERENCE.trees[step], "target/kernel": tensor}}
    return dataclasses.replace(REFERENCE, trees=trees)


def compared(ours, float32=True):
    found = run._compare_results(REFERENCE, ours, float32=float32, tokens=TOKENS)
    return run.Parity(found, REFERENCE.losses, ours.losses, 0, "new", float32, None)


# What is changed by x, and the first finding that has to depart if x exceeds the bound.
BOUNDS = {
    "activation": (1e-5, "encoder", lambda x: larger_tensor("activations", lambda a: a * (1 + x))),
    "token losses": (1e-4, "targets of the first batch",
                     lambda x: larger("token_losses", lambda a: a + x, (0, 1))),
    "first loss": (1e-5, "step 1", lambda x: larger("losses", lambda a: a * (1 + x), 0)),
    "gradient": (1e-5, "kernel", lambda x: larger_tensor("gradients", lambda a: a * (1 + x))),
    "first step": (1e-5, "target/kernel", lambda x: other_tree(1, lambda a: a * (1 + x))),
    "later loss": (1e-4, "steps 1 to 20", lambda x: larger("losses", lambda a: a * (1 + x), 19)),
    "score": (1e-4, "evaluation, for each target token",
              lambda x: larger("scores", lambda a: a - 5 * x, 1)),
}  # fmt: skip


@pytest.mark.parametrize("quantity", BOUNDS)
def test_each_quantity_departs_beyond_its_own_bound_alone(quantity):
    bound, name, changed = BOUNDS[quantity]
    assert compared(changed(0.99 * bound)).passed
    (departure,) = compared(changed(1.01 * bound)).departures
    assert departure.name == name and departure.tolerance == bound
    assert departure.error == pytest.approx(1.01 * bound)
    assert compared(changed(float("nan"))).departures[0].name == name


def test_what_has_no_bound_is_reported():
    for ours in (larger("losses", lambda a: 2 * a, 20), other_tree(25, lambda a: 2 * a)):
        found = compared(ours)
        assert found.passed
        assert [f.tolerance for f in found.findings if f.error] == [None]
    assert compared(larger("losses", lambda a: 2 * a), float32=False).passed


def test_losses_of_twenty_steps_are_listed_once():
    twenty = dataclasses.replace(REFERENCE, losses=REFERENCE.losses[:20])
    found = run._compare_results(twenty, twenty, float32=True, tokens=TOKENS)
    assert [f.name for f in found if f.kind == "loss"] == ["step 1", "steps 1 to 20"]


def test_a_small_entry_is_judged_by_its_tensors_size():
    tensor = TENSOR.copy()
    tensor[1, 1] = 1e-5  # where the reference has 0, and the RMS is 1.6
    trees = {**REFERENCE.trees, 1: {"target/kernel": tensor, "unused": np.zeros(1)}}
    assert compared(dataclasses.replace(REFERENCE, trees=trees)).passed


def test_a_difference_from_zeros_alone_is_infinite():
    zeros = dataclasses.replace(REFERENCE, gradients={"kernel": np.zeros((2, 2))})
    found = run._compare_results(zeros, REFERENCE, float32=True, tokens=TOKENS)
    assert [f.error for f in found if f.kind == "gradient"] == [float("inf")]
    found = run._compare_results(zeros, zeros, float32=True, tokens=TOKENS)
    assert [f.error for f in found if f.kind == "gradient"] == [0.0]


def test_a_tensor_that_one_stack_lacks_or_has_in_another_shape_is_an_error():
    with pytest.raises(ValueError, match="Only one stack has the gradient bias, kernel"):
        compared(dataclasses.replace(REFERENCE, gradients={"bias": TENSOR}))
    with pytest.raises(ValueError, match="activation encoder has the shapes"):
        compared(dataclasses.replace(REFERENCE, activations={"encoder": TENSOR[:1]}))


def test_metrics_are_equal_or_undefined_on_both_stacks():
    undefined = float("nan")
    same = {"accuracy": 50.0, "auc": undefined}
    assert run._metrics_finding("rte", same, same, float32=True).passes
    for other in ({"accuracy": 50.1, "auc": undefined}, {"accuracy": 50.0, "auc": 40.0}):
        assert not run._metrics_finding("rte", same, other, float32=True).passes


def test_a_tasks_metric_of_both_stacks_outputs_departs_where_one_output_does():
    def accuracy(targets, predictions):
        return {"accuracy": 100 * np.mean(np.array(targets) == np.array(predictions))}

    judge = Judge("rte", postprocess, [accuracy])
    task = run.ScoredTask(judge, [{"targets_pretokenized": text} for text in ("yes", "no")])
    theirs, other = (dataclasses.replace(REFERENCE, scores=["yes", x]) for x in ("no", "yes"))
    assert run._metrics(task, theirs, theirs, float32=True).passes
    found = run._metrics(task, theirs, other, float32=True)
    assert found.name == "rte: accuracy" and found.error == 50.0 and not found.passes
    assert run._metrics(task, theirs, other, float32=False).passes


def test_the_verdict_counts_what_was_judged_and_names_the_first_departure():
    # Two losses after the twentieth step's, and the last step, are reported.
    same = compared(REFERENCE)
    judged = len(BOUNDS)
    assert report.verdict(same) == (
        f"The stacks agree: all {judged} quantities are within their tolerances."
    )
    both = dataclasses.replace(
        larger("losses", lambda a: a * (1 + 2e-5), 0),
        gradients={"kernel": 2 * TENSOR},
    )
    assert report.verdict(compared(both)) == (
        "The stacks first differ at the loss step 1: 2.00e-05, where 1e-05 is allowed;"
        f" 2 of {len(same.findings)} quantities exceed their tolerances."
    )
    assert "not judged" in report.verdict(compared(REFERENCE, float32=False))


def test_a_kinds_row_names_what_exceeds_its_own_tolerance_most():
    findings = compared(larger("losses", lambda a: a * (1 + 5e-5), slice(0, 20))).findings
    losses = [finding for finding in findings if finding.kind == "loss"]
    row = report._summary("loss", losses)
    assert row[:3] == ("loss", "3", "step 1") and row[4:] == ("1e-05", "1")


def test_a_report_has_both_curves_a_bar_for_each_tensor_its_bound_and_the_sources(tmp_path):
    ours = larger_tensor("gradients", lambda a: 2 * a)
    inputs = MeshInputs("", ["dataset.gin"], ["run.train_steps = 25"], module_imports=[])
    job = SimpleNamespace(inputs=inputs, task=None, out=tmp_path)
    written = report.write_report(compared(ours), job)
    assert {path.name for path in written} == {"parity.json", "parity.md", "parity.html"}

    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["first_departure"] == {"kind": "gradient", "name": "kernel"}
    assert found["losses"]["jax"] == found["losses"]["mesh_tensorflow"] == REFERENCE.losses.tolist()
    assert {f["measure"] for f in found["findings"]} == {
        "the tensor's RMS", "the tensor's RMS or the entry", "the value itself", "one target token",
    }  # fmt: skip

    html = (tmp_path / "parity.html").read_text()
    loss, *errors = html.split("<svg")[1::2]  # each plot for wide screens, then for narrow ones
    assert "Mesh TensorFlow" in loss and "JAX" in loss
    of_kinds = {"encoder: 0", "kernel: 1.00e+00", "target/kernel: 0"}
    assert len(errors) == 4 and of_kinds == {
        tip for tip in of_kinds for plot in errors if f'data-tip="{tip}' in plot
    }
    # Names are text, which wraps on a narrow screen.
    assert '<th scope="row">gradient</th>' in html and '<th scope="row">kernel</th>' in html
    assert '<td data-name="worst" class="text wide">kernel</td>' in html
    text = (tmp_path / "parity.md").read_text()
    assert "## Where this comes from\n" in text
    assert "gin files: dataset.gin." in text and "run.train_steps = 25" in text


@pytest.mark.parametrize("factor", [2, float("nan")])
def test_a_bar_that_departs_and_the_bounds_line_have_a_color_of_their_own(factor):
    found = compared(larger_tensor("gradients", lambda a: factor * a)).findings
    plots = {f.kind: report.error_plot([f], f.kind) for f in found if f.kind in report.TITLES}
    bars = {kind: plot.count("fill: var(--chance)") for kind, plot in plots.items()}
    assert bars == {"activation": 0, "gradient": 2, "first step": 0, "last step": 0}
    bounds = {kind: plot.count("stroke: var(--chance)") for kind, plot in plots.items()}
    assert bounds == {"activation": 2, "gradient": 2, "first step": 2, "last step": 0}


def test_bars_of_errors_beyond_the_axis_end_with_it():
    (finding,) = (f for f in compared(REFERENCE).findings if f.kind == "activation")
    plots = [
        report.error_plot([dataclasses.replace(finding, error=x)], "") for x in (1e4, float("inf"))
    ]
    first, second = (re.findall(r' d="([^"]*)"', plot) for plot in plots)
    assert first == second and len(first) > 2
