"""Beam's runners in place of local processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dacite

from t0repro.errors import UserError
from t0repro.storage import write_atomically
from t0repro.tasks.prompt_cache.shards import PieceResult, SpooledRows, spool_rows, write_piece

# The result type of each function, since results come back as JSON.
_RESULTS = {"spool_rows": SpooledRows, "write_piece": PieceResult}


_FUNCTIONS = {"spool_rows": spool_rows, "write_piece": write_piece}


class BeamWorkers:
    """Accepts calls like a process pool, and runs them when a caller waits for their results.

    Args:
      options: Beam's pipeline options, as on the command line of a pipeline.
      folder: a folder that all workers can access, for results.
    """

    def __init__(self, options: Sequence[str], folder: Path):
        self._options, self._folder = list(options), folder
        self._queued: list[tuple[Future[Any], str, tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queues a call of one of `_FUNCTIONS`."""
        future: Future[Any] = Future()
        self._queued.append((future, function.__name__, arguments))
        return future

    def finished(self, futures: Collection[Future[Any]]) -> set[Future[Any]]:
        """Runs a pipeline over everything queued, after which all futures have their results."""
        import apache_beam as beam

        queued, self._queued = self._queued, []
        with tempfile.TemporaryDirectory(dir=self._folder) as results:
            calls = [(n, name, arguments) for n, (_, name, arguments) in enumerate(queued)]
            with _pipeline(self._options) as pipeline:
                # Reshuffle, so that calls are spread over all workers.
                _ = pipeline | beam.Create(calls) | beam.Reshuffle() | beam.Map(_call, results)
            for number, (future, name, _) in enumerate(queued):
                future.set_result(_read(Path(results, f"{number}.json"), name))
        return set(futures)


def _pipeline(options: Sequence[str]) -> Any:
    """A pipeline with these options.

    Raises:
      UserError: if Beam refuses them.
    """
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    said = io.StringIO()
    try:
        # argparse prints the refused option, below hundreds of lines of usage, and exits.
        with contextlib.redirect_stderr(said):
            parsed = PipelineOptions(options)
            parsed.get_all_options()  # by itself Beam parses many of them while it works
            return beam.Pipeline(options=parsed)
    except (ValueError, SystemExit) as error:
        reason = error if isinstance(error, ValueError) else said.getvalue().splitlines()[-1]
        raise UserError(
            f"Beam refuses its options: {reason}",
            where="--beam_options",
            fix="Correct them: the options of Beam's own pipelines, joined by commas.",
        ) from error


def _call(call: tuple[int, str, tuple[Any, ...]], results: str) -> None:
    """Runs a call on a worker; writes its result, or the user error that it found."""
    number, name, arguments = call
    try:
        result = dataclasses.asdict(_FUNCTIONS[name](*arguments))
    except UserError as error:
        result = {"error": [error.what, error.where, error.fix]}
    write_atomically(Path(results, f"{number}.json"), json.dumps(result))


def _read(path: Path, name: str) -> Any:
    """A call's result.

    Raises:
      UserError: if the call found a user error.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    if "error" in result:
        what, where, fix = result["error"]
        raise UserError(what, where=where, fix=fix)
    for field in ("statistics", "files"):  # JSON's names are strings
        if field in result:
            result[field] = {key == "true": value for key, value in result[field].items()}
    return dacite.from_dict(_RESULTS[name], result, dacite.Config(strict=True))
