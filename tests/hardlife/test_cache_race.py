"""Two runs of `t0repro cache` in one folder, the second started at many moments of the first."""

import multiprocessing
import os
import time

import pytest

from t0repro.errors import UserError

from ..tasks.prompt_caches import files, make

pytestmark = pytest.mark.hardlife

STARTS = int(os.environ.get("T0REPRO_STARTS", "40"))
TASKS = ("demo_synthetic_imdb_Reviewer_Sentiment_Feeling",)
REFUSED = 2


def cache(folder):
    """What the command does once it is started; exits as it does."""
    try:
        make(folder, *TASKS)
    except UserError as error:
        os._exit(REFUSED if "Another run holds" in str(error) else 3)
    os._exit(0)


def test_a_second_cache_never_harms_the_first_whenever_it_starts(outcome, tmp_path):
    import t0repro.tasks.demo  # noqa: F401

    # Forked, so that the moments fall into the caching and not into a minute of imports.
    fork = multiprocessing.get_context("fork")
    begun = time.monotonic()
    make(tmp_path / "whole", *TASKS)
    seconds = time.monotonic() - begun
    expected = files(tmp_path / "whole")
    refused = 0
    for number in range(STARTS):
        folder = tmp_path / str(number)
        runs = [fork.Process(target=cache, args=(folder,)) for _ in range(2)]
        runs[0].start()
        time.sleep(1.2 * seconds * number / STARTS)
        runs[1].start()
        for run in runs:
            run.join(600)
        codes = sorted(run.exitcode for run in runs)
        refused += codes == [0, REFUSED]
        # The second may come when all is done, and find everything cached.
        assert codes in ([0, 0], [0, REFUSED]), (number, codes)
        assert files(folder) == expected, number
    assert 0 < refused < STARTS
    outcome(
        f"two caches in one folder: {STARTS} starts over {1.2 * seconds:.1f} s, {refused} refused,"
        f" each time the same {len(expected)} files"
    )
