"""Modes score_from_dataset and score_from_strings, and the files that they save scores in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.errors import UserError
from t0repro.runs.loaded_model import loaded


def score_from_dataset(configuration: Configuration) -> None:
    """Mode score_from_dataset: scores every target of a dataset and saves the scores."""
    from t0repro.data.eval_data import scored_examples

    _score(configuration, scored_examples(configuration.run))


def score_from_strings(configuration: Configuration) -> None:
    """Mode score_from_strings: scores lines of text and saves the scores.

    Targets are encoded with the inputs' vocabulary.
    """
    from t0repro.evaluation import text_files

    strings, lengths = configuration.run.score_strings, configuration.run.sequence_length
    assert strings is not None and lengths is not None
    vocabulary = configuration.vocabularies[0]
    inputs, targets = text_files.strings_to_score(strings)
    # 0 is padding, which is not scored.
    ends = {"inputs": strings.eos_id, "targets": strings.eos_id if strings.score_eos else 0}
    columns = {
        name: text_files.encode_lines(lines, vocabulary, ends[name], lengths[name])
        for name, lines in (("inputs", inputs), ("targets", targets))
    }
    examples = [
        {"inputs": source, "targets": target}
        for source, target in zip(columns["inputs"], columns["targets"], strict=True)
    ]
    _score(configuration, examples)


def _score(configuration: Configuration, examples: Sequence[Any]) -> None:
    """Scores examples at the chosen checkpoint and saves the files of save_scores."""
    from t0repro.evaluation.checkpoint_choice import one_checkpoint
    from t0repro.evaluation.engine import score_examples
    from t0repro.evaluation.task_output import check_finite

    config = configuration.run
    if config.scores_filename is None:
        raise UserError(
            "save_scores.scores_filename is not bound: the scores would be lost.",
            where=config.provenance.get("mode"),
            fix="Bind it to a prefix: scores are written to <prefix>.scores.",
        )
    lengths = config.sequence_length
    assert lengths is not None
    (checkpoint,) = loaded(configuration, iter([one_checkpoint(config)]))
    # The engine counts tokens, a run sequences: as many tokens as a batch of full rows has.
    tokens = config.batch_size * max(lengths.values())
    scores = score_examples(
        checkpoint.params, checkpoint.model, examples, lengths, tokens_per_batch=tokens
    )
    # Before anything is written: a score that is not finite is no result.
    check_finite(scores, config.mode, checkpoint.step)
    with ScoreFiles(configuration) as files:
        files.add(scores, [example["targets"] for example in examples])
        files.commit()


class ScoreFiles:
    """Writes `<prefix>.scores` and, with save_example_text, `.targets` and `.lengths`.

    Each file has one line per example; none appears under its name before all are written. Lengths
    count the tokens up to and including EOS, without padding.

    Source: mesh_tensorflow.transformer.utils.save_scores.
    """

    def __init__(self, configuration: Configuration):
        from t0repro.evaluation.task_output import LineFile

        config, self._vocabulary = configuration.run, configuration.vocabularies[1]
        self._texts = config.save_example_text
        suffixes = ("scores", "targets", "lengths") if self._texts else ("scores",)
        self._files = [LineFile(Path(f"{config.scores_filename}.{each}")) for each in suffixes]

    def add(self, scores: Iterable[Any], targets: Iterable[np.ndarray]) -> None:
        """Adds one line per example."""
        self._files[0].write(f"{score:g}" for score in scores)
        if self._texts:
            tokens = [_until_eos(ids) for ids in targets]
            texts = (
                self._vocabulary.decode([token for token in ids if token > 0]) for ids in tokens
            )
            self._files[1].write(texts)
            self._files[2].write(len(ids) for ids in tokens)

    def commit(self) -> None:
        """Gives the files their names."""
        for file in self._files:
            file.commit()

    def __enter__(self) -> ScoreFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.discard()  # finds nothing to remove after a commit


def _until_eos(ids: np.ndarray, eos: int = 1) -> list[int]:
    tokens = np.trim_zeros(np.asarray(ids), "b").tolist()
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
