"""The modes of t5_mesh_transformer that evaluate, on JAX: files and metrics as on Mesh TensorFlow.

    eval                generates for the evaluation's tasks and judges by their metrics
    score_eval          the same by the log-likelihoods of targets
    perplexity_eval     teacher-forced metrics
    infer               a text file in, <output_filename>-<step> out
    score_from_dataset  log-likelihoods of a dataset's targets, into <scores_filename>.scores, ...
    score_from_strings  the same of a text file's lines

Each takes a RunConfig, and the vocabularies of inputs and targets where text is read or written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.runs.command_record import record_command

Vocabularies = tuple[Any, Any]  # seqio's, of inputs and of targets
Model = tuple[Any, dict, int]  # the T5, its parameters and the global step


def evaluate(config: RunConfig, vocabularies: Vocabularies) -> None:
    """Modes eval and score_eval: judges the tasks at each chosen checkpoint."""
    from t0repro.evaluation import score_eval
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricsManager

    tasks = _tasks(config)
    lengths = config.sequence_length or score_eval.longest(tasks)
    make = _scorer if config.mode == "score_eval" else _generator
    folder = score_eval.evaluation_folder(config)
    for model in loaded(config, chosen_checkpoints(config)):
        output = make(config, model, lengths, vocabularies)
        results = []
        metrics = MetricsManager(config.model_dir, writers=[event_writer(folder)])
        for result in score_eval.evaluate(config, tasks, model[2], output):
            results.append(result)
            assert config.eval_data is not None
            metrics.write(config.eval_data.split, result.step, result.metrics, task=result.task)
        metrics.close()
        if config.mode == "score_eval" and config.scores_filename is not None:
            _save_scores(
                config,
                [score for result in results for score in result.scores],
                [example["targets"] for task in tasks for example in task.examples],
                vocabularies,
            )


def _tasks(config: RunConfig) -> list[EvalTask]:
    from t0repro.data.batches import eval_tasks

    if config.eval_data is None:
        raise UserError(
            f"Mode {config.mode!r} needs run.eval_dataset_fn.",
            where=config.provenance.get("mode"),
            fix=f"Add --gin_file={config.mode}.gin.",
        )
    return list(eval_tasks(config.eval_data, config.sequence_length))


def _scorer(
    config: RunConfig, model: Model, lengths: Mapping[str, int], vocabularies: Vocabularies
) -> Callable[..., Any]:
    from t0repro.evaluation.engine import score_examples

    del vocabularies
    tokens = config.batch_size * max(lengths.values())
    return functools.partial(score_examples, model[1], model[0], tokens_per_batch=tokens)


def _generator(
    config: RunConfig, model: Model, lengths: Mapping[str, int], vocabularies: Vocabularies
) -> Callable[..., list[str]]:
    def generate(examples: Sequence[Mapping[str, Any]], unused: Mapping[str, int]) -> list[str]:
        del unused
        inputs = [example["inputs"] for example in examples]
        return _generated(config, model, inputs, lengths["inputs"], vocabularies)

    return generate


def _generated(
    config: RunConfig,
    model: Model,
    inputs: Sequence[np.ndarray],
    inputs_length: int,
    vocabularies: Vocabularies,
    fill_with_first: int = 0,
) -> list[str]:
    """The texts that a model gives for inputs; see generate_tokens."""
    from t0repro.evaluation.generation import generate_tokens, texts_of

    tokens = generate_tokens(
        model[1],
        model[0],
        inputs,
        config.decoding,
        # Outputs have as much room as the padded inputs unless the length is bound.
        length=config.decoding.max_length or inputs_length,
        batch_size=config.batch_size,
        inputs_length=inputs_length,
        fill_with_first=fill_with_first,
    )
    return texts_of(tokens, vocabularies[1])


def evaluate_perplexity(config: RunConfig, vocabularies: Vocabularies) -> None:
    """Mode perplexity_eval."""
    from t0repro.data.eval_data import perplexity_batches
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints
    from t0repro.evaluation.perplexity import evaluate_perplexity
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricsManager

    del vocabularies
    steps = config.perplexity_eval_steps
    data = config.eval_data or config.train_data
    split = data.split if data else "eval"
    datasets = perplexity_batches(config)
    for model, params, step in loaded(config, chosen_checkpoints(config)):
        for task, batches in datasets:
            values = evaluate_perplexity(params, model, batches, steps)
            # The name tells how many examples were asked for, as Mesh TensorFlow's folder does.
            name = f"{task}_{split}_{config.batch_size * steps}"
            name += f"_{config.eval_dir_suffix}" if config.eval_dir_suffix is not None else ""
            events = event_writer(f"{config.model_dir}/eval_{name}")
            metrics = MetricsManager(config.model_dir)
            metrics.write(split, step, values, task=task)
            metrics.close()
            events.write_scalars(step, values)
            events.close()


def infer(config: RunConfig, vocabularies: Vocabularies) -> None:
    """Mode infer: generates for the lines of a file."""
    from t0repro.evaluation import text_files
    from t0repro.evaluation.checkpoint_choice import chosen_checkpoints

    assert config.infer is not None and config.sequence_length is not None
    lines, length = text_files.infer_inputs(config.infer), config.sequence_length["inputs"]
    inputs = text_files.encode_lines(lines, vocabularies[0], config.infer.eos_id, length)
    repeats = config.infer.repeats
    fill = repeats * (-(len(lines) // repeats) % config.batch_size)
    for model in loaded(config, chosen_checkpoints(config)):
        texts = _generated(config, model, inputs, length, vocabularies, fill)
        text_files.write_lines(f"{config.infer.output_filename}-{model[2]}", texts)


def score_from_dataset(config: RunConfig, vocabularies: Vocabularies) -> None:
    """Mode score_from_dataset: scores every target of a dataset."""
    from t0repro.data.eval_data import scored_examples

    _score(config, scored_examples(config), vocabularies)


def score_from_strings(config: RunConfig, vocabularies: Vocabularies) -> None:
    """Mode score_from_strings: scores lines of text; targets are read by the inputs' vocabulary."""
    from t0repro.evaluation import text_files

    strings, lengths = config.score_strings, config.sequence_length
    assert strings is not None and lengths is not None
    inputs, targets = text_files.strings_to_score(strings)
    ends = {"inputs": strings.eos_id, "targets": strings.eos_id if strings.score_eos else 0}
    columns = {
        name: text_files.encode_lines(lines, vocabularies[0], ends[name], lengths[name])
        for name, lines in (("inputs", inputs), ("targets", targets))
    }
    examples = [
        {"inputs": source, "targets": target}
        for source, target in zip(columns["inputs"], columns["targets"], strict=True)
    ]
    _score(config, examples, vocabularies)


def _score(config: RunConfig, examples: Sequence[Any], vocabularies: Vocabularies) -> None:
    """Scores examples at the chosen checkpoint and saves what save_scores would."""
    from t0repro.evaluation.checkpoint_choice import one_checkpoint
    from t0repro.evaluation.engine import score_examples
    from t0repro.evaluation.score_eval import check_finite

    if config.scores_filename is None:
        raise UserError(
            "save_scores.scores_filename is not bound: the scores would be lost.",
            where=config.provenance.get("mode"),
            fix="Bind it to a prefix: scores are written to <prefix>.scores.",
        )
    lengths = config.sequence_length
    assert lengths is not None
    (model, params, step), *_ = loaded(config, iter([one_checkpoint(config)]))
    tokens = config.batch_size * max(lengths.values())
    scores = score_examples(params, model, examples, lengths, tokens_per_batch=tokens)
    check_finite(scores, config.mode, step)
    _save_scores(config, list(scores), [ex["targets"] for ex in examples], vocabularies)


def _save_scores(
    config: RunConfig,
    scores: Sequence[Any],
    targets: Sequence[np.ndarray],
    vocabularies: Vocabularies,
) -> None:
    """Writes `<prefix>.scores` and, with the text, `.targets` and `.lengths`, a line an example.

    Lengths count the tokens before the first padding; what follows an EOS is none.

    Source: mesh_tensorflow.transformer.utils.save_scores.
    """
    from t0repro.evaluation.text_files import write_lines

    prefix = config.scores_filename
    write_lines(f"{prefix}.scores", [f"{score:g}" for score in scores])
    if not config.save_example_text:
        return
    tokens = [_until_eos(ids) for ids in targets]
    texts = [vocabularies[1].decode([token for token in ids if token > 0]) for ids in tokens]
    write_lines(f"{prefix}.targets", texts)
    write_lines(f"{prefix}.lengths", [len(ids) for ids in tokens])


def _until_eos(ids: np.ndarray, eos: int = 1) -> list[int]:
    tokens = np.trim_zeros(np.asarray(ids), "b").tolist()
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def loaded(config: RunConfig, checkpoints: Iterator[Any]) -> Iterator[Model]:
    """Each checkpoint's model, parameters and step, loaded when its turn comes."""
    import jax

    from t0repro.converters import sources
    from t0repro.model.t5 import T5, initial_parameters
    from t0repro.training.train_state import parameters_from_flat_tree

    record_command(config)
    model = T5(config.model, config.dtypes)
    shapes = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    for checkpoint in checkpoints:
        tree = sources.load_any(checkpoint.path, slots=False)
        params = parameters_from_flat_tree(tree, shapes, where=checkpoint.path)
        yield model, params, int(tree["state/step"])
