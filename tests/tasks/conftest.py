"""T0's facts, and a folder of a few rows in the layout of the datasets."""

import json
from pathlib import Path

import pytest

ROWS = [
    {"premise": "It rained all day.", "hypothesis": "The street is wet.", "label": 0, "idx": 0},
    {"premise": "He sold the farm.", "hypothesis": "He bought a farm.", "label": 1, "idx": 1},
    {"premise": "She sings.", "hypothesis": "She is silent.", "label": -1, "idx": 2},
]


@pytest.fixture(scope="session")
def t0_facts() -> Path:
    """The folder of T0's counted facts."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "t0"
    if not folder.is_dir():
        pytest.skip("T0's facts (../shared/t0) are not here")
    return folder


@pytest.fixture
def rows_root(tmp_path: Path) -> Path:
    """A root folder that holds super_glue/rte with three rows, the last without a label."""
    folder = tmp_path / "rows" / "super_glue" / "rte"
    folder.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in ROWS]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return tmp_path / "rows"
