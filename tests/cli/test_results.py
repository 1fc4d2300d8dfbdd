"""JSON on standard output is JSON, and all of it."""

import dataclasses
import json
from pathlib import Path

from t0repro.cli.results import print_json

from .commands import run


@dataclasses.dataclass
class Point:
    name: str
    values: tuple[float, ...]


def test_what_json_does_not_have_becomes_what_it_has(capsys):
    print_json({Path("a"): [Point("\x1b[31m", (1.0, float("nan"), float("inf")))], 1: Path("b")})
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed) == {
        "a": [{"name": "\x1b[31m", "values": [1.0, None, None]}], "1": "b",
    }  # fmt: skip


def test_released_checkpoints_and_what_one_needs(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "checkpoint", "released", "--json", "--family", "T0")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0 and found["bigscience/T0_3B"]["parameters"] > 2.8e9
    code, out, _ = run(monkeypatch, capsys, "checkpoint", "plan", "bigscience/T0_3B", "--json")
    needs = json.loads(out)["needs"]
    assert code == 0 and needs["parameters"] == found["bigscience/T0_3B"]["parameters"]
    assert needs["training"] > needs["evaluation"] > needs["parameters"]
