"""Modes infer, score_from_dataset and score_from_strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.decoding import InferConfig, ScoreStringsConfig
from t0repro.config.run import CheckpointRun, MeshEvalRun, TextRun
from t0repro.data.batches import list_scored_examples
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.task_output import LineFile, check_finite
from t0repro.runs.checkpoint_choice import (
    choose_checkpoints,
    generate_texts,
    load_checkpoints,
    one_checkpoint,
)
from t0repro.runs.text_files import encode_lines, infer_inputs, strings_to_score, write_lines
from t0repro.storage import output_path


def infer(configuration: Configuration[TextRun]) -> None:
    """Generates an output for each line of a file, at each chosen checkpoint."""
    config, text = configuration.run, configuration.run.text
    assert isinstance(text, InferConfig) and config.sequence_length is not None
    lines, length = infer_inputs(text), config.sequence_length["inputs"]
    vocabulary, repeats = configuration.vocabularies[0], text.repeats
    inputs = encode_lines(lines, vocabulary, text.eos_id, length)
    # As in Mesh TensorFlow, which pads the last batch with the first input, once per repeat.
    fill = repeats * (-(len(lines) // repeats) % config.batch_size)
    for model in load_checkpoints(configuration, choose_checkpoints(config)):
        texts = generate_texts(configuration, model, inputs, length, fill)
        write_lines(f"{text.output_filename}-{model.step}", texts)


def score_from_dataset(configuration: Configuration[MeshEvalRun]) -> None:
    """Mode score_from_dataset: scores every target of a dataset and saves the scores."""
    _score(configuration, list_scored_examples(configuration.run))


def score_from_strings(configuration: Configuration[TextRun]) -> None:
    """Mode score_from_strings: scores lines of text and saves the scores.

    Targets are encoded with the inputs' vocabulary.
    """
    strings, lengths = configuration.run.text, configuration.run.sequence_length
    assert isinstance(strings, ScoreStringsConfig) and lengths is not None
    # Mesh TensorFlow's encode_inputs encodes the targets too, by this vocabulary.
    vocabulary = configuration.vocabularies[0]
    inputs, targets = strings_to_score(strings)
    # 0 is padding, which is not scored.
    ends = {"inputs": strings.eos_id, "targets": strings.eos_id if strings.score_eos else 0}
    columns = {
        name: encode_lines(lines, vocabulary, ends[name], lengths[name])
        for name, lines in (("inputs", inputs), ("targets", targets))
    }
    examples = [
        {"inputs": source, "targets": target}
        for source, target in zip(columns["inputs"], columns["targets"], strict=True)
    ]
    _score(configuration, examples)


def _score(configuration: Configuration[CheckpointRun], examples: Sequence[Any]) -> None:
    """Scores examples at the chosen checkpoint and saves the files of save_scores."""
    config = configuration.run
    if config.scores_filename is None:
        raise UserError(
            "save_scores.scores_filename is not bound: the scores would be lost.",
            where=config.provenance.get("mode"),
            fix="Bind it to a prefix: scores are written to <prefix>.scores.",
        )
    lengths = config.sequence_length
    assert lengths is not None
    (checkpoint,) = load_checkpoints(configuration, iter([one_checkpoint(config)]))
    scores = score_examples(checkpoint.params, checkpoint.model, examples, lengths)
    # Check before writing: a score that is NaN or Inf is not a result.
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

    def __init__(self, configuration: Configuration[CheckpointRun]):
        config, self._vocabulary = configuration.run, configuration.vocabularies[1]
        self._texts = config.save_example_text
        suffixes = ("scores", "targets", "lengths") if self._texts else ("scores",)
        self._files = [
            LineFile(output_path(f"{config.scores_filename}.{each}")) for each in suffixes
        ]

    def add(self, scores: Iterable[Any], targets: Iterable[np.ndarray]) -> None:
        """Adds one line per example."""
        # Mesh TensorFlow's format, six significant digits (save_scores).
        self._files[0].write(f"{score:g}" for score in scores)
        if self._texts:
            tokens = [_cut_after_eos(ids) for ids in targets]
            texts = (
                self._vocabulary.decode([token for token in ids if token > 0]) for ids in tokens
            )
            self._files[1].write(texts)
            self._files[2].write(len(ids) for ids in tokens)

    def commit(self) -> None:
        """Renames the files into place."""
        for file in self._files:
            file.commit()

    def __enter__(self) -> ScoreFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.discard()  # finds nothing to remove after a commit


def _cut_after_eos(ids: np.ndarray) -> list[int]:
    tokens = np.trim_zeros(np.asarray(ids), "b").tolist()
    return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens  # T5's EOS
