"""Jobs and their results without any death, made once for each file of tests."""

import os
import random
from pathlib import Path

import pytest

from . import jobs, more_jobs
from .jobs import Job, Result, timed

# Every hardship is for these; the others are killed only.
NAMES = ("cache", "convert to mtf", "convert to hf", "convert to jax", "train", "rank-eval")
KILLED = (
    *NAMES,
    *("score_eval", "infer", "infer (T5X)", "perplexity_eval"),
    *("plot", "train on mtf", "Beam cache"),
)


@pytest.fixture(scope="session")
def deaths() -> int:
    """How often each job dies: T0REPRO_DEATHS, or 4."""
    return int(os.environ.get("T0REPRO_DEATHS", "4"))


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory) -> Path:
    """The folder in which jobs run that nothing disturbs."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="session")
def trained(whole, whole_folder):
    """A function that gives the folder of a training run that never died."""

    def run() -> Path:
        whole("train")
        return whole_folder / "train"

    return run


@pytest.fixture(scope="session")
def whole(whole_folder):
    """A function from a job's name to the job, its result and the seconds that it takes."""
    folder = whole_folder
    checkpoint = jobs.write_checkpoint(folder / "checkpoint")
    done: dict[str, tuple[Job, Result, float]] = {}

    def job_named(name: str) -> Job:
        if name == "cache":
            return jobs.cache_job()
        if name.startswith("convert to "):
            return jobs.convert_job(checkpoint, name.removeprefix("convert to "))
        if name == "train":
            run("cache")
            return jobs.train_job(folder / "cache")
        if name == "train on mtf":
            run("cache")
            return more_jobs.mesh_train_job(jobs.train_job(folder / "cache"))
        if name == "Beam cache":
            return more_jobs.beam_cache_job()
        if name == "rank-eval":
            return jobs.rank_eval_job(checkpoint)
        if name == "infer (T5X)":
            return more_jobs.t5x_infer_job(folder / "tiny")
        if name == "plot":
            return more_jobs.plot_job(more_jobs.write_losses(folder / "losses"))
        run("train")
        return more_jobs.evaluation_job(name, folder / "train")

    def run(name: str) -> tuple[Job, Result, float]:
        if name not in done:
            job = job_named(name)
            done[name] = (job, *timed(job, folder / name.replace(" ", "_")))
        return done[name]

    return run


@pytest.fixture
def moments(request):
    """Draws moments of death; the seed is in the test's outcome, T0REPRO_SEED chooses another."""
    seed = int(os.environ.get("T0REPRO_SEED", "0"))
    return random.Random(f"{request.node.name} {seed}")


@pytest.fixture
def outcome(request):
    """Takes a line for the summary at the end, which docs/evidence/reliability.md quotes."""

    def say(line: str) -> None:
        request.node.user_properties.append(("outcome", line))

    return say


@pytest.fixture
def on_tmpfs(tmp_path):
    """A function that mounts a file system of some bytes; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk_{len(mounted)}"
        folder.mkdir()
        jobs.mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        jobs.unmount(folder)
