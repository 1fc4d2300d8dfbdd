"""What the labels of cells and platforms stand for."""

import pytest

from t0repro.cloud.launchers.machines import Machine, find_machine
from t0repro.errors import UserError

FILE = """
platforms:
  jf_2x2: {launcher: slurm, options: [--partition=gpu], memory_gb: 64}
cells:
  iz: {memory_gb: 32, environment: {CUDA_VISIBLE_DEVICES: "1"}}
"""


def test_a_cells_fields_win_over_a_platforms(tmp_path):
    (tmp_path / "machines.yaml").write_text(FILE)
    machine = find_machine(tmp_path / "machines.yaml", "jf_2x2", "iz")
    assert machine == Machine(
        launcher="slurm",
        options=["--partition=gpu"],
        memory_gb=32,
        environment={"CUDA_VISIBLE_DEVICES": "1"},
    )


def test_without_a_file_labels_mean_this_machine():
    assert find_machine(None, "jf_2x2", "iz") == Machine()


@pytest.mark.parametrize(
    ("text", "platform", "what"),
    [
        (FILE, "jf_2x3", "There is no jf_2x3 among the platforms.*jf_2x2"),
        ("platforms: {a: {lancher: slurm}}", "a", "An entry of the file of machines is wrong"),
        ("platforms: {a: {cpus: many}}", "a", "An entry of the file of machines is wrong"),
        ("platforms: {a: {memory_gb: -1}}", "a", "memory_gb is -1.*Give a number above 0"),
        ("platforms: {a: {time_limit: .nan}}", "a", "time_limit is nan"),
        ("platforms: {a: {cpus: 0}}", "a", "cpus is 0"),
        ("platforms: [", "a", "The file of machines cannot be read"),
        ("platforms: {\udcff: {}}", "a", "The file of machines cannot be read.*can't decode byte"),
        ("- a", "a", "There is no a among"),
        ("platforms: {a: [slurm]}", "a", "a among the platforms is not a table of fields"),
        (
            "platforms: {a: {options: --partition=gpu}}",
            "a",
            r"options should be a list, as \[--partition=gpu\], and is '--partition=gpu'",
        ),
        ("platforms: {a: {options: [1]}}", "a", "options should be a list"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path, text, platform, what):
    # A lone surrogate stands for a byte that is not UTF-8.
    (tmp_path / "machines.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"(?s){what}"):
        find_machine(tmp_path / "machines.yaml", platform, None)
