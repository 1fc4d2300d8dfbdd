"""--use_model_api on Mesh TensorFlow: each --mode is one call of t5's MtfModel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from t0repro.config.mtf.model_api import check_mode, checkpoint_steps
from t0repro.errors import UserError


def run(flags: Any) -> None:
    """Runs the mode that --mode names.

    Raises:
      UserError: If the flags contradict each other.
    """
    from t5.models.mtf_model import MtfModel

    check_mode(flags)
    steps = checkpoint_steps(flags)
    model = MtfModel(
        tpu_job_name=flags.tpu_job_name,
        tpu=flags.tpu,
        gcp_project=flags.gcp_project,
        tpu_zone=flags.tpu_zone,
        tpu_topology=flags.tpu_topology,
        model_parallelism=flags.model_parallelism,
        model_dir=flags.model_dir,
        batch_size=flags.batch_size,
        sequence_length={
            "inputs": flags.input_sequence_length,
            "targets": flags.target_sequence_length,
        },
    )
    MODES[flags.mode](model, flags, steps)


def _train(model: Any, flags: Any, steps: Any) -> None:
    del steps
    model.train(mixture_or_task_name=flags.mixture_or_task, steps=flags.train_steps)


def _finetune(model: Any, flags: Any, steps: Any) -> None:
    model.finetune(
        mixture_or_task_name=flags.mixture_or_task,
        steps=flags.train_steps,
        pretrained_model_dir=flags.pretrained_model_dir,
        checkpoint_steps=_single(steps),
    )


def _evaluate(model: Any, flags: Any, steps: Any) -> None:
    model.eval(
        mixture_or_task_name=flags.mixture_or_task,
        checkpoint_steps=steps,
        summary_dir=flags.eval_summary_dir,
        split=flags.eval_split,
    )


def _predict(model: Any, flags: Any, steps: Any) -> None:
    model.predict(
        checkpoint_steps=steps,
        input_file=flags.input_file,
        output_file=flags.output_file,
        beam_size=flags.beam_size,
        temperature=flags.temperature,
        keep_top_k=flags.keep_top_k,
    )


def _score(model: Any, flags: Any, steps: Any) -> None:
    model.score(
        flags.input_file, flags.target_file, scores_file=flags.output_file, checkpoint_steps=steps
    )


def _export(model: Any, flags: Any, steps: Any) -> None:
    model.export(
        export_dir=flags.export_dir,
        checkpoint_step=_single(steps),
        beam_size=flags.beam_size,
        temperature=flags.temperature,
        keep_top_k=flags.keep_top_k,
        eval_with_score=flags.mode == "export_score",
    )


def _single(steps: int | str | list[int]) -> int:
    """The single step that fine-tuning or an export starts from; -1 means the latest.

    Raises:
      UserError: If the flags name all steps or several.
    """
    if steps == "all" or (isinstance(steps, list) and len(steps) != 1):
        raise UserError(
            "Fine-tuning and exports start from a single checkpoint.",
            where="--checkpoint_mode",
            fix="Give --checkpoint_mode=latest, or specific with one of --checkpoint_steps.",
        )
    return steps[0] if isinstance(steps, list) else int(steps)


MODES: dict[str, Callable[[Any, Any, Any], None]] = {
    "train": _train,
    "finetune": _finetune,
    "eval": _evaluate,
    "predict": _predict,
    "score": _score,
    "export_predict": _export,
    "export_score": _export,
}
