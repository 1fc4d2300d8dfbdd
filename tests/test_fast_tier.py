"""The fast tier touches every package."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ENTRIES = [
    line for line in (TESTS / "fast_tier.txt").read_text().splitlines() if not line.startswith("#")
]


def test_every_file_of_the_fast_tier_exists():
    files = [TESTS.parent / entry.partition("::")[0] for entry in ENTRIES]
    assert [str(path) for path in files if not path.is_file()] == []


def test_every_folder_of_tests_is_in_the_fast_tier():
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")} - {"hardlife"}
    touched = {entry.split("/")[1] for entry in ENTRIES if entry.count("/") > 1}
    assert folders - touched == set()
