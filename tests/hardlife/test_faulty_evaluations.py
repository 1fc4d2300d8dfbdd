"""Evaluations in a bucket whose store fails, and that are killed at each kind of write."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from t0repro import storage

from . import more_jobs
from .jobs import Job, Result, rank_eval_job, write_checkpoint
from .test_faulty_store import in_each_store, killed_at, make_unreliable, runs_to_the_end
from .test_faulty_store import store as store  # a fixture

pytestmark = pytest.mark.hardlife

# A command's name -> the files that it writes and that must not depend on any fault.
RESULTS = {
    "infer": f"out/{more_jobs.TASK}-*",
    "eval": f"out/inference_eval/{more_jobs.TASK}-*",
    "rank-eval": "out/scores.csv",
    # Modes of t5_mesh_transformer --backend=jax, which write into the model's folder.
    "mesh infer": "answers-*",
    "mesh eval": "validation_eval/demo_*",
    "mesh score_eval": "validation_eval/demo_*",
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation in a place, which has a folder's files at first.

    Attributes:
      mode: the command.
      inputs: the folder.
      command: its arguments, given the place: a folder or an address.
    """

    mode: str
    inputs: Path
    command: Callable[[str], list[str]]

    def result(self, place: str) -> Result:
        """The files that must not depend on any fault, by name."""
        with storage.fetch(place) as folder:
            found = [path for path in folder.glob(RESULTS[self.mode]) if _is_same(path.name)]
            names = {str(path.relative_to(folder)): path.read_bytes() for path in found}
        times = re.compile(rb'"[^"]*(time|second)[^"]*": [^,}]+')
        return {name: times.sub(b"", x).replace(place.encode(), b"") for name, x in names.items()}

    def job(self, environment: dict[str, str] | None = None) -> Job:
        """The job that `killed_at` and others start."""
        return Job(self.mode, self.command, self.result, None, 0.0, lambda place: environment or {})


def _is_same(name: str) -> bool:
    """Whether a file has no times or places in it that cannot be taken out."""
    return "tfevents" not in name and not name.endswith("COMPLETED")


@pytest.fixture(scope="module")
def evaluation(trained, tmp_path_factory):
    """A function from a mode to its evaluation and what it leaves in a folder."""
    done = {}

    def of(mode: str) -> tuple[Evaluation, Result]:
        if mode not in done:
            folder = tmp_path_factory.mktemp(mode.replace(" ", "_"))
            made = _evaluation(mode, folder / "inputs", trained)
            shutil.copytree(made.inputs, folder / "here")
            done[mode] = made, made.job().finish(str(folder / "here"))
            assert done[mode][1]
        return done[mode]

    return of


def _evaluation(mode: str, folder: Path, trained: Callable[[], Path]) -> Evaluation:
    if mode == "rank-eval":
        folder.mkdir()
        write_checkpoint(folder)

        def command(place: str) -> list[str]:
            line = rank_eval_job(Path("CHECKPOINT")).command(Path("OUT"))
            places = {"CHECKPOINT": f"{place}/checkpoint_7", "OUT": f"{place}/out"}
            return [places.get(part, part) for part in line]

    elif mode.startswith("mesh "):
        more_jobs.begin_evaluation(trained(), folder)

        def command(place: str) -> list[str]:
            return more_jobs.evaluation_command(mode.removeprefix("mesh "), place)

    else:
        folder.mkdir()
        more_jobs.write_t5x_checkpoint(folder)

        def command(place: str) -> list[str]:
            return more_jobs.t5x_command(mode, f"{place}/checkpoint_7", f"{place}/out")

    return Evaluation(mode, folder, command)


def begin(made: Evaluation, address: str) -> None:
    """Makes a place of a bucket what an evaluation begins with."""
    storage.remove_all(address)
    storage.put_tree(made.inputs, address)


@pytest.mark.parametrize("mode", RESULTS)
@in_each_store
def test_an_evaluation_in_a_store_that_fails_now_and_then_gives_the_same(
    store, evaluation, mode, outcome
):
    made, expected = evaluation(mode)
    address, runs, number = f"{store.bucket}/place", 0, 0
    make_unreliable(store)
    # Until each kind of fault has happened; not every mode lists what it has just written.
    while number < 2 or not all(x for kind, x in store.counts.items() if kind != "hidden"):
        number += 1
        begin(made, address)
        runs += runs_to_the_end(made.job(store.environment), address, lambda address: None)
        assert made.result(address) == expected
        assert number < 9, store.counts
    faults = ", ".join(f"{count} x {kind}" for kind, count in store.counts.items() if count)
    outcome(
        f"{mode} in a store that fails ({store.bucket}): {faults}: {runs} starts of"
        f" {number} evaluations, the same {len(expected)} files each time"
    )


@pytest.mark.parametrize(
    ("store", "mode"),
    [
        *(("gs", "rank-eval"), ("gs", "infer"), ("gs", "mesh score_eval")),
        *(("s3", "rank-eval"), ("s3", "eval"), ("s3", "mesh infer"), ("s3", "mesh eval")),
    ],
    indirect=["store"],
)
def test_killed_at_each_kind_of_write_an_evaluation_in_a_bucket_gives_the_same(
    store, evaluation, mode, outcome
):
    made, expected = evaluation(mode)
    job, kinds, address = made.job(store.environment), [], f"{store.bucket}/place"
    begin(made, address)
    store.seen = lambda request: kinds.append(_kind_of(request)) if request.writes else None
    assert job.finish(address) == expected
    begin(made, address)
    kinds = list(dict.fromkeys(kinds))
    for kind in kinds:
        if not killed_at(job, address, store, kind, "before"):
            begin(made, address)  # it had all been written before
            assert killed_at(job, address, store, kind, "before"), kind
        assert made.result(address).items() <= expected.items(), kind
    assert job.finish(address) == expected
    outcome(
        f"kill -9 at each kind of write of {mode} ({store.bucket}): died {len(kinds)} times, and"
        f" ended with the same {len(expected)} files"
    )


def _kind_of(request):
    """A pattern of what a request writes or removes, whatever the task and its numbers are."""
    name = request.name.rpartition("/")[2]
    if name.startswith("demo_"):  # a task's file
        return f"^{request.method} /.*/demo_[^/]*{re.split('[-_.]', name)[-1]}$"
    return f"^{request.method} /.*" + re.sub(r"\d+", r"\\d+", re.escape(name)) + "$"
