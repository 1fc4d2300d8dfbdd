"""Lines of text, scored or continued by a checkpoint: `t0repro.score`, and t5's modes for texts.

`t0repro.score` takes a checkpoint of any format and answer choices. The modes infer,
score_from_dataset and score_from_strings read and write files.

Source: mesh_tensorflow.transformer.utils (get_inputs_from_file, encode_inputs, decode_from_file,
score_from_strings, save_scores, write_lines_to_file).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.configuration import Configuration
from t0repro.config.decoding import InferConfig, ScoreStringsConfig
from t0repro.config.run_config import DType
from t0repro.data.batches import scored_examples
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.opened import (
    Checkpoint,
    adapter_at,
    open_checkpoint,
    opened_once,
    with_adapter,
)
from t0repro.evaluation.selection import check_fits
from t0repro.evaluation.task_output import LineFile, check_finite
from t0repro.files import output_path, write_atomically
from t0repro.model.shapes import Int
from t0repro.runs.checkpoint_choice import (
    chosen_checkpoints,
    generated_texts,
    loaded,
    one_checkpoint,
)
from t0repro.tasks.vocabulary import VocabularyFile, named_vocabulary
from t0repro.words import counted

LENGTHS = {"inputs": 1024, "targets": 256}  # T0's


def score(
    model: str | os.PathLike[str] | Checkpoint,
    inputs: Sequence[str],
    choices: Sequence[str] | Sequence[Sequence[str]],
    *,
    vocabulary: str | os.PathLike[str] | None = None,
    lengths: Mapping[str, int] = LENGTHS,
    activation: DType = "float32",
    adapter: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Log-likelihood of each answer choice given its input: float32 [inputs, choices], natural log.

    Scores sum over the choice's tokens, EOS included, and are not divided by their number. They
    equal those of `t0repro rank-eval`, which predicts the choice with the highest score. If an
    input has fewer choices than another, its row ends in -inf.

    Args:
      model: A checkpoint's path in any format that t0repro converts, or an opened checkpoint. A
        path's latest checkpoint stays in memory for the next call, until there is a newer one or
        its files, or the gin files beside it, change.
      inputs: The rendered prompts.
      choices: The choices of all inputs, or a sequence of choices for each input.
      vocabulary: The SentencePiece model, with or without T5's sentinels, or "bytes" for ByT5's; by
        default T5's own, or the one that T0REPRO_VOCAB names.
      lengths: Maximum tokens of `inputs` and `targets`; longer ones are cut.
      activation: dtype of the activations, if `model` is a path.
      adapter: An adapter's checkpoint, or a folder of PEFT's, for which `model` is the base.

    Raises:
      UserError: If the checkpoint or the vocabulary is missing or they do not fit together, an
        input has no choice, a text is no string, a length is below 1, or the adapter was trained
        on another base.
    """
    of_each = _of_each(inputs, choices)
    _check_lengths(lengths)
    file = named_vocabulary(vocabulary)
    if isinstance(model, Checkpoint):
        checkpoint = model
    else:
        checkpoint = opened_once(_open, os.fspath(model), activation)
    if adapter is not None:
        checkpoint = with_adapter(checkpoint, adapter_at(os.fspath(adapter)))
    check_fits(file, checkpoint)
    examples = _examples(file, inputs, of_each, lengths)
    found = iter(score_examples(checkpoint.params, checkpoint.model, examples, lengths))
    scores = np.full((len(inputs), max(map(len, of_each), default=0)), -np.inf, np.float32)
    for row, its_choices in zip(scores, of_each, strict=True):
        row[: len(its_choices)] = [next(found) for _ in its_choices]
    return scores


def _open(path: str, activation: DType) -> Checkpoint:
    return open_checkpoint(path, None, activation)


def _of_each(
    inputs: Sequence[str], choices: Sequence[str] | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The choices for each input."""
    if isinstance(inputs, str) or isinstance(choices, str):
        raise UserError(
            "The inputs or the choices are a single string.",
            where="score",
            fix="Give lists of strings.",
        )
    # A sequence of texts serves every input; a sequence of sequences has one for each.
    shared = [choice for choice in choices if isinstance(choice, str)]
    of_each = [shared] * len(inputs) if shared else [list(each) for each in choices]
    if len(of_each) != len(inputs) or not all(of_each) or 0 < len(shared) < len(choices):
        raise UserError(
            f"{len(inputs)} inputs, but choices for {len(choices)}.",
            where="score",
            fix="Give a list of texts, for all inputs, or a list of such lists, one an input.",
        )
    for name, texts in (("inputs", [inputs]), ("choices", of_each)):
        for row in texts:
            for number, text in enumerate(row):
                if not isinstance(text, str):
                    raise UserError(
                        f"There is {text!r} among the {name}, at {number}; it is not a string.",
                        where="score",
                        fix="Give strings; leave out what is missing.",
                    )
    return of_each


def _check_lengths(lengths: Mapping[str, int]) -> None:
    for name in LENGTHS:
        length = lengths.get(name)
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise UserError(
                f"The length of {name} is {length!r}, not a whole number above 0.",
                where="score, lengths",
                fix=f"Give both, as {LENGTHS}, or none for these.",
            )


def _examples(
    file: VocabularyFile,
    inputs: Sequence[str],
    choices: Sequence[Sequence[str]],
    lengths: Mapping[str, int],
) -> list[dict[str, np.ndarray]]:
    """One example per pair; as in T0's tasks, only targets end with EOS, truncated or not."""
    # T0's tasks cut first and append EOS afterwards (SeqIO's append_eos_after_trim).
    processor, room = file.processor(), lengths["targets"] - 1
    examples = []
    for text, of_input in zip(inputs, choices, strict=True):
        tokens = np.array(processor.encode(text), np.int32)
        for choice in of_input:
            target = [*processor.encode(choice)[:room], file.eos_id]
            examples.append({"inputs": tokens, "targets": np.array(target, np.int32)})
    return examples


# ---- Modes infer, score_from_dataset and score_from_strings --------------------------------------


def infer(configuration: Configuration) -> None:
    """Generates an output for each line of a file, at each chosen checkpoint."""
    config = configuration.run
    assert config.infer is not None and config.sequence_length is not None
    lines, length = infer_inputs(config.infer), config.sequence_length["inputs"]
    vocabulary = configuration.vocabularies[0]
    inputs = encode_lines(lines, vocabulary, config.infer.eos_id, length)
    repeats = config.infer.repeats
    # As in Mesh TensorFlow, which pads the last batch with the first input, once per repeat.
    fill = repeats * (-(len(lines) // repeats) % config.batch_size)
    for model in loaded(configuration, chosen_checkpoints(config)):
        texts = generated_texts(configuration, model, inputs, length, fill)
        write_lines(f"{config.infer.output_filename}-{model.step}", texts)


def score_from_dataset(configuration: Configuration) -> None:
    """Mode score_from_dataset: scores every target of a dataset and saves the scores."""
    _score(configuration, scored_examples(configuration.run))


def score_from_strings(configuration: Configuration) -> None:
    """Mode score_from_strings: scores lines of text and saves the scores.

    Targets are encoded with the inputs' vocabulary.
    """
    strings, lengths = configuration.run.score_strings, configuration.run.sequence_length
    assert strings is not None and lengths is not None
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


def _score(configuration: Configuration, examples: Sequence[Any]) -> None:
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
    (checkpoint,) = loaded(configuration, iter([one_checkpoint(config)]))
    # The engine's limit is in tokens, a run's in sequences: convert by a batch of full rows.
    tokens = config.batch_size * max(lengths.values())
    scores = score_examples(
        checkpoint.params, checkpoint.model, examples, lengths, tokens_per_batch=tokens
    )
    # Check before writing: a score that is NaN or Inf is no result.
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
            tokens = [_until_eos(ids) for ids in targets]
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


def _until_eos(ids: np.ndarray, eos: int = 1) -> list[int]:
    tokens = np.trim_zeros(np.asarray(ids), "b").tolist()
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


# ---- Text files ----------------------------------------------------------------------------------


def read_lines(path: str, binding: str) -> list[str]:
    """Reads a file's lines, without trailing whitespace and without an empty last line.

    Args:
      path: the file; any address that etils.epath opens.
      binding: the gin binding that names it, for messages.

    Raises:
      UserError: if there is no such file or it has no lines.
    """
    from etils import epath

    try:
        text = epath.Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(
            f"There is no file {path}.", where=binding, fix="Bind it to a text file."
        ) from error
    # As Mesh TensorFlow splits: an empty last line is dropped, empty ones before it count.
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")] if text else []
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"{path} has no lines.", where=binding, fix="Give a line for each input.")
    return lines


def encode_lines(
    lines: Iterable[str], vocabulary: Any, eos_id: int, length: int
) -> list[Int[np.ndarray, " length"]]:
    """Token ids of each line followed by EOS, cut to `length` (which may cut off the EOS)."""
    # Mesh TensorFlow's order (encode_inputs): EOS first, then the cut.
    return [
        np.array([*vocabulary.encode(line.strip()), eos_id][:length], np.int32) for line in lines
    ]


def infer_inputs(config: InferConfig) -> list[str]:
    """The lines that infer decodes, each repeated as often as configured."""
    lines = read_lines(config.input_filename, "decode_from_file.input_filename")
    return [line for line in lines for _ in range(config.repeats)]


def strings_to_score(config: ScoreStringsConfig) -> tuple[list[str], list[str]]:
    """Inputs and targets to score, in equal number.

    The configuration may give several consecutive targets for each input, or one for all inputs.

    Raises:
      UserError: if the numbers of inputs and targets do not match, or there are no inputs.
    """
    if config.inputs is None:
        raise UserError(
            "score_from_strings.inputs is None.",
            fix="An encoder-decoder model needs inputs: bind it to a file or a list.",
        )
    inputs, targets = (
        read_lines(value, f"score_from_strings.{name}") if isinstance(value, str) else list(value)
        for name, value in (("inputs", config.inputs), ("targets", config.targets))
    )
    if len(inputs) < len(targets):
        if not inputs or len(targets) % len(inputs):
            raise UserError(
                f"{counted(len(targets), 'target')} cannot be split across"
                f" {counted(len(inputs), 'input')}.",
                where="score_from_strings.targets",
                fix="Give as many targets as inputs, or equally many for each input.",
            )
        repeats = len(targets) // len(inputs)
        inputs = [line for line in inputs for _ in range(repeats)]
    elif len(targets) < len(inputs):
        if len(targets) != 1:
            raise UserError(
                f"{len(inputs)} inputs need more than {counted(len(targets), 'target')}.",
                where="score_from_strings.targets",
                fix="Give one target for all inputs, or one or several for each.",
            )
        targets = targets * len(inputs)
    return inputs, targets


def write_lines(path: str | Path, lines: Sequence[Any]) -> None:
    """Writes one line per value, with newlines replaced by spaces."""
    text = "".join(str(line).replace("\n", " ") + "\n" for line in lines)
    write_atomically(path, text)
