"""--use_model_api: the flags of t5's Model API as the bindings of `run` that do the same.

    --mode=train, finetune    run.mode = 'train'
    --mode=eval               run.mode = 'eval'
    --mode=predict            run.mode = 'infer'
    --mode=score              run.mode = 'score_from_strings'

As in t5.models.mtf_model.MtfModel, all modes but train read <model_dir>/operative_config.gin
(finetune reads that of --pretrained_model_dir) after the command line's gin files and parameters.
Bindings of `MtfModel` replace those of `run`. The evaluation writes the files of mode eval.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gin
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, record_bindings
from t0repro.config.mtf.parser import (
    MESH_TRANSFORMER,
    MeshInputs,
    list_deprecated_references,
    parse,
)
from t0repro.errors import UserError

_MODEL = "t5.models.mtf_model.MtfModel"
_FLAGS = "a flag of --use_model_api"
_EXPORTS = ("export_predict", "export_score")
# MtfModel's arguments that `run` has under the same name; the rest comes from flags.
_OF_RUN = (
    "model_type", "autostack", "keep_checkpoint_max", "save_checkpoints_steps", "variable_filter",
    "iterations_per_loop", "layout_rules", "mesh_shape", "learning_rate_schedule", "optimizer",
)  # fmt: skip
_NOT_SUPPORTED = ("predict_fn", "ensemble_inputs", "mesh_devices")
# MtfModel's own defaults, for arguments with another default in `run`.
_DEFAULTS = {
    "save_checkpoints_steps": "5000",
    "layout_rules": "'ensemble:ensemble,batch:batch,d_ff:model,heads:model,vocab:model,"
    "experts:batch'",
    "mesh_shape": "''",
    "learning_rate_schedule": "@learning_rate_schedules.learning_rate_schedule_noam",
    "optimizer": "@mesh_tensorflow.optimize.AdafactorOptimizer",
}


class FoundCheckpoint(Protocol):
    """The facts about a checkpoint that fine-tuning needs to start from it."""

    @property
    def path(self) -> str:
        """The checkpoint's own path, not its directory's."""
        ...

    @property
    def step(self) -> int | None:
        """Its global step; None if its name does not show one."""
        ...


# Maps a directory and a step (None for the latest) to the checkpoint there.
FindCheckpoint = Callable[[str, int | None], FoundCheckpoint]


def parse_model_api(
    inputs: MeshInputs, flags: Any, find_checkpoint: FindCheckpoint, *, with_packages: bool
) -> Bindings:
    """Fills gin's global configuration from the flags of the Model API.

    Args:
      inputs: gin files, parameters and search paths of the command line.
      flags: t5's parsed flags.
      find_checkpoint: finds the checkpoint that mode finetune starts from; not called in other
        modes.
      with_packages: see `parse`.

    Raises:
      UserError: for flags that do not fit together, or an export.
    """
    check_mode(flags)
    if flags.mode in _EXPORTS:
        raise export_refusal(flags.mode, "--mode")
    steps = checkpoint_steps(flags)
    parsed = parse(inputs, with_packages=with_packages)
    places = dict(parsed.places)
    # The parser has locked gin's configuration.
    with gin.unlock_config():
        with record_bindings() as read:
            _read_operative_config(flags)
        places |= read.places
        with record_bindings() as bound:
            _bind_model()
            gin.parse_config(_statements(flags, steps, find_checkpoint))
        # No file has these bindings.
        places |= dict.fromkeys(bound.places, _FLAGS)
        # predict and score read texts: MtfModel then takes the vocabulary that gin binds.
        name = flags.mixture_or_task if flags.mode in ("train", "finetune", "eval") else None
        find_vocabularies: Any = gin.get_configurable(f"{MESH_TRANSFORMER}.get_vocabulary")
        gin.bind_parameter("run.vocabulary", find_vocabularies(name))
    return Bindings(places, scopes=parsed.scopes | read.scopes | bound.scopes)


def check_mode(flags: Any) -> None:
    """Raises UserError if --mode is missing; absl has checked its name."""
    if not flags.mode:
        raise UserError(
            "--use_model_api needs a mode.",
            where="--mode",
            fix="Add --mode=train, finetune, eval, predict or score.",
        )


def export_refusal(mode: str, where: str | None) -> NotOnJax:
    """The error for a mode that writes a TensorFlow SavedModel."""
    return NotOnJax(
        f"Mode {mode!r} writes a TensorFlow SavedModel, which the JAX stack does not.",
        where=where,
        fix="To serve or share the model, write it for Hugging Face: t0repro convert MODEL_DIR OUT"
        " --to hf. A SavedModel: --backend=mtf, after t0repro convert MODEL_DIR OUT --to mtf.",
    )


def checkpoint_steps(flags: Any) -> int | str | list[int]:
    """The step, or steps, that --checkpoint_mode and --checkpoint_steps select."""
    if flags.checkpoint_mode != "specific":
        if flags.checkpoint_steps:
            raise UserError(
                f"--checkpoint_steps is given, and --checkpoint_mode is {flags.checkpoint_mode!r}.",
                fix="Add --checkpoint_mode=specific, or drop --checkpoint_steps.",
            )
        return -1 if flags.checkpoint_mode == "latest" else "all"
    try:
        # absl has split the list at its commas, into strings.
        return [int(step) for step in flags.checkpoint_steps]
    except ValueError as error:
        raise UserError(
            f"--checkpoint_steps holds {flags.checkpoint_steps!r}.", fix="Give numbers: 1000,2000."
        ) from error


def _read_operative_config(flags: Any) -> None:
    if flags.mode == "train":
        return
    flag = "--pretrained_model_dir" if flags.mode == "finetune" else "--model_dir"
    folder = flags.pretrained_model_dir if flags.mode == "finetune" else flags.model_dir
    path = os.path.join(folder, "operative_config.gin")
    if not folder or not os.path.isfile(path):
        raise UserError(
            f"There is no {path}, from which mode {flags.mode!r} reads the model.",
            where=flag,
            fix="Give the directory of a trained model.",
        )
    gin.parse_config_file(path, skip_unknown=list_deprecated_references())


def _bind_model() -> None:
    """Binds MtfModel's bound values, or its defaults, to `run`."""
    given: Mapping[str, Any] = door.bound().get(("", _MODEL), {})
    for name in _NOT_SUPPORTED:
        if given.get(name) is not None:
            raise NotOnJax(f"The JAX stack does not support MtfModel.{name}.", fix="Unbind it.")
    if given.get("extra_gin_bindings"):
        gin.parse_config(given["extra_gin_bindings"])
    # gin's bindings of MtfModel win, then MtfModel's own default, which differs from `run`'s.
    for name in _OF_RUN:
        if name in given:
            gin.bind_parameter(f"run.{name}", given[name])
        elif name in _DEFAULTS:
            gin.parse_config(f"run.{name} = {_DEFAULTS[name]}")


def _statements(flags: Any, steps: int | str | list[int], find_checkpoint: FindCheckpoint) -> str:
    """The gin bindings that correspond to the flags."""
    lengths = {"inputs": flags.input_sequence_length, "targets": flags.target_sequence_length}
    common = [f"run.batch_size = {flags.batch_size}"]
    if flags.mode != "eval":
        common += [f"run.sequence_length = {lengths}", "run.eval_dataset_fn = None"]
    if flags.mode in ("train", "finetune"):
        return "\n".join([*common, *_training_statements(flags, steps, find_checkpoint)])
    common += ["run.train_steps = 0", f"run.eval_checkpoint_step = {steps!r}"]
    return "\n".join([*common, *_evaluation_statements(flags)])


def _training_statements(
    flags: Any, steps: int | str | list[int], find_checkpoint: FindCheckpoint
) -> list[str]:
    train_steps, start = flags.train_steps, None
    if flags.mode == "finetune":
        checkpoint = find_checkpoint(flags.pretrained_model_dir, _step_to_tune(steps))
        if checkpoint.step is None:
            raise UserError(
                "The checkpoint's name does not say its step, from which training counts.",
                where=checkpoint.path,
                fix="Rename it to model.ckpt-<step>.",
            )
        # MtfModel counts from the checkpoint's step.
        train_steps, start = checkpoint.step + train_steps, checkpoint.path
    return [
        "run.mode = 'train'",
        "run.dataset_split = 'train'",
        "run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn",
        f"mesh_train_dataset_fn.mixture_or_task_name = {flags.mixture_or_task!r}",
        f"run.train_steps = {train_steps}",
        f"run.init_checkpoint = {start!r}",
    ]


def _step_to_tune(steps: int | str | list[int]) -> int | None:
    if steps == "all" or (isinstance(steps, list) and len(steps) != 1):
        raise UserError(
            "Fine-tuning starts from a single checkpoint.",
            where="--checkpoint_mode",
            fix="Give --checkpoint_mode=latest, or specific with one of --checkpoint_steps.",
        )
    return steps[0] if isinstance(steps, list) else None


def _evaluation_statements(flags: Any) -> list[str]:
    if flags.mode == "eval":
        return [
            "run.mode = 'eval'",
            # MtfModel.eval uses the longest example's, whatever the flags set.
            "run.sequence_length = None",
            f"run.dataset_split = {flags.eval_split!r}",
            f"run.eval_summary_dir = {flags.eval_summary_dir or None!r}",
            "run.eval_dataset_fn = @t5.models.mesh_transformer.mesh_eval_dataset_fn",
            f"mesh_eval_dataset_fn.mixture_or_task_name = {flags.mixture_or_task!r}",
        ]
    if flags.mode == "predict":
        return [
            "run.mode = 'infer'",
            f"Bitransformer.decode.beam_size = {flags.beam_size}",
            f"Bitransformer.decode.temperature = {flags.temperature}",
            f"Bitransformer.decode.sampling_keep_top_k = {flags.keep_top_k}",
            f"utils.decode_from_file.input_filename = {flags.input_file!r}",
            f"utils.decode_from_file.output_filename = {flags.output_file!r}",
        ]
    return [
        "run.mode = 'score_from_strings'",
        f"score_from_strings.inputs = {flags.input_file!r}",
        f"score_from_strings.targets = {flags.target_file!r}",
        "score_from_strings.score_postprocess_fn = @save_scores",
        f"save_scores.scores_filename = {flags.output_file or None!r}",
    ]
