import json

import pytest

from t0repro.errors import UserError
from t0repro.reports.comparison_page import losses_in_words
from t0repro.reports.losses import compare_losses, loss_curve, read_losses


def write_metrics(path, losses, split="train"):
    lines = [json.dumps({"split": split, "step": s, "loss": x}) for s, x in losses.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_losses_are_aligned_by_step(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {1: 4.0, 2: 2.0, 3: 1.0})
    b = write_metrics(tmp_path / "b.jsonl", {2: 2.002, 3: 1.0, 4: 0.5})
    compared = compare_losses(a, b)
    assert [row.step for row in compared.rows] == [2, 3]
    assert compared.worst.step == 2
    assert compared.worst.relative_difference == pytest.approx(1e-3)
    assert (compared.only_a, compared.only_b) == (1, 1)


def test_seeds_that_differ_are_named_with_both_values(tmp_path):
    runs = []
    for name, file, seed in (("a", "operative_config.gin", 1), ("b", "config.gin", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(f"x.seed = {seed}\ny.seed = 3\nrun.steps = {seed}\n")
        runs.append(write_metrics(tmp_path / name / "metrics.jsonl", {1: 4.0}))
    compared = compare_losses(*runs)
    assert losses_in_words(compared).endswith(" The runs have other seeds: x.seed (1; 2).")
    (tmp_path / "b" / "config.gin").write_text("x.seed = 1\n")
    assert compare_losses(*runs).seeds == ("y.seed (3; unset)",)


def test_a_step_done_again_after_a_restart_has_its_last_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"split": "train", "step": 2, "loss": 2.0},
        {"split": "train", "step": 1, "loss": 3.0},
        {"split": "train", "step": 2, "loss": 2.5},
        {"split": "validation", "step": 2, "loss": 9.0},
        {"split": "train", "step": 3, "learning_rate": 0.1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert read_losses(path) == {1: 3.0, 2: 2.5}
    assert list(read_losses(path)) == [1, 2]


def test_unusable_losses_are_a_users_mistake(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {1: 4.0})
    with pytest.raises(UserError, match="no metrics file"):
        compare_losses(a, tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"no training step in common \(steps 1 to 1 and steps 2"):
        compare_losses(a, write_metrics(tmp_path / "b.jsonl", {2: 4.0}))
    with pytest.raises(UserError, match="no loss of the split 'train': none of its 1 line has"):
        compare_losses(a, write_metrics(tmp_path / "b.jsonl", {1: 4.0}, split="validation"))
    (tmp_path / "empty.jsonl").write_text("")
    for use in (lambda path: compare_losses(a, path), lambda path: loss_curve(path, "jax")):
        with pytest.raises(UserError, match="it is empty"):
            use(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="loss at step 1 is nan"):
        compare_losses(a, write_metrics(tmp_path / "c.jsonl", {1: float("nan")}))
    broken = tmp_path / "d.jsonl"
    broken.write_text('{"split"\n{"split": "train", "step": 1, "loss": 1.0}\n')
    with pytest.raises(UserError, match="d.jsonl:1"):
        compare_losses(a, broken)


def test_losses_are_read_as_other_programs_save_the_file(tmp_path):
    path = write_metrics(tmp_path / "metrics.jsonl", {1: 4.0, 2: 3.0})
    lines = path.read_text()
    for content in (
        b"\xef\xbb\xbf" + lines.encode(),
        lines.replace("\n", "\r\n").encode(),
        lines.encode() + '{"split": "é'.encode()[:-1],  # killed in the middle of a letter
    ):
        path.write_bytes(content)
        assert read_losses(path) == {1: 4.0, 2: 3.0}
    path.write_bytes(lines.encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16; save it as UTF-8") as error:
        read_losses(path)
    assert error.value.where == f"{path}:1"


@pytest.mark.parametrize(
    ("step", "loss"), [("null", "1"), ("1.5", "1"), ("NaN", "1"), ("1", '"NaN"'), ("1", "[2]")]
)
def test_a_training_line_without_numbers_is_named(tmp_path, step, loss):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"split": "train", "step": {step}, "loss": {loss}}}\n')
    with pytest.raises(UserError, match="not both numbers"):
        read_losses(path)


def test_a_curve_is_per_target_token_where_every_step_has_that(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"split": "train", "step": step, "loss": 0.2 * step} for step in (1, 2)]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(lines[0] | {"loss": 9.0, "loss_per_target_token": 1.2}) + "\n")
    for count, expected in ((1, (0.2, 0.4)), (2, (1.2, 2.4))):
        for line in lines[:count]:
            line["loss_per_target_token"] = 6 * line["loss"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        curve = loss_curve(path, "jax")
        assert curve.losses == pytest.approx(expected)
        assert curve.unit == ("loss in its own unit", "loss per target token")[count - 1]
        # So are those of two runs, whatever each divides its loss by.
        compared = compare_losses(path, other)
        assert compared.unit == curve.unit
        assert compared.rows[0].loss_a == pytest.approx(expected[0])
        assert compared.rows[0].loss_b == (9.0, 1.2)[count - 1]
