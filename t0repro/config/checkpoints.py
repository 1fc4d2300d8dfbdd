"""The checkpoints of a run: which it writes, starts from, and evaluates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from t0repro.config.model import DType
from t0repro.config.settings import Mtf, Only, Range, T5x, arguments, or_none


def _make_tuple(value: Sequence | None) -> tuple:
    return tuple(value or ())


@arguments(t5x="checkpoints.SaveBestCheckpointer")
@dataclasses.dataclass(frozen=True)
class BestCheckpoints:
    """Keeps the checkpoints with the best value of a metric, and the latest.

    Attributes:
      metric: `<run>/<tag>` as TensorBoard shows it, for instance "train/accuracy".
      mode: Whether the largest or the smallest value is best.
      keep_without_metric: Whether to keep checkpoints of steps without the metric.
    """

    metric: Annotated[str, T5x("metric_name_to_monitor")] = "train/accuracy"
    mode: Annotated[Literal["max", "min"], T5x("metric_mode")] = "max"
    keep_without_metric: Annotated[bool, T5x("keep_checkpoints_without_metrics")] = True


@arguments(t5x="utils.SaveCheckpointConfig", mtf="utils.run")
@dataclasses.dataclass(frozen=True)
class SaveConfig:
    """Which checkpoints a training run writes and keeps.

    Attributes:
      period: Steps between checkpoints.
      steps: Further steps after which to save.
      keep: How many of the latest to keep (of the best, with `best`); None keeps all.
      dtype: Dtype of the parameters in a checkpoint; None keeps float32. Slots stay float32.
      data: Whether to save the position in the data, so that a run can resume exactly there.
      keep_period: Checkpoints of steps divisible by this are always kept.
      from_first_step: True, as in T5X: periods count from the step at which the run first began,
        and that state is saved too. False, as in Mesh TensorFlow: periods count from the step at
        which training starts or resumes.
    """

    # 0 means none too: the run then saves at `steps` and at its end.
    period: Annotated[
        int | None,
        Range(at_least=1),
        T5x(read=or_none, default=None),
        Mtf("save_checkpoints_steps"),
    ]
    steps: Annotated[
        tuple[int, ...],
        Range(at_least=0),
        T5x("checkpoint_steps", hint=Sequence[int] | None, default=None, read=_make_tuple),
        Only(mtf=()),
    ] = ()
    # 0 keeps all, as in TensorFlow's Saver, which Mesh TensorFlow writes with.
    keep: Annotated[int | None, Range(at_least=1), Mtf("keep_checkpoint_max", read=or_none)] = None
    dtype: Annotated[DType | None, T5x(default="float32"), Only(mtf=None)] = None
    data: Annotated[bool, T5x("save_dataset"), Only(mtf=True)] = False
    best: Annotated[BestCheckpoints | None, T5x("checkpointer_cls", hint=Any), Only(mtf=None)] = (
        None
    )
    keep_period: Annotated[int | None, Range(at_least=1), T5x(read=or_none), Only(mtf=None)] = None
    # With T5X's rule a resumed run saves at the same steps as an uninterrupted one; TensorFlow's
    # own timer of checkpoints remembers nothing of earlier processes.
    from_first_step: Annotated[bool, Only(mtf=False, t5x=True)] = True


@arguments(t5x="utils.RestoreCheckpointConfig")
@dataclasses.dataclass(frozen=True)
class RestoreConfig:
    """The source of a run's parameters and slots when its model_dir has no checkpoint.

    Attributes:
      path: A checkpoint in any format, or with mode "latest" a folder of checkpoints; only an
        evaluation takes several, one after the other.
      mode: "specific", "latest" or "all".
      dtype: Dtype to which parameters are rounded when read; None keeps their values.
      assignment_map: (pattern, replacement) pairs on complete names such as `target/decoder/...`; a
        replacement of None keeps the initialized value.
      strict: Whether every slot must be in the checkpoint.
      fallback_to_scratch: Whether to initialize parameters that the checkpoint lacks.
      variable_filter: Mesh TensorFlow's rule, in place of T5X's four above: a regular expression on
        Mesh TensorFlow's names that selects variables; "" takes all. None in a T5X run.
      adapter: A checkpoint of an adapter, or a folder of PEFT's, whose base is the checkpoint. An
        evaluation reads the two merged; the training of an adapter starts from its parameters.
    """

    path: Annotated[
        str | tuple[str, ...], T5x(hint=str | Sequence[str]), Mtf("utils.run.init_checkpoint")
    ]
    mode: Annotated[Literal["specific", "latest", "all"], Only(mtf="specific")] = "latest"
    # float16 too: it only rounds the values read, and no run computes in it.
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, Only(mtf=None)] = None
    assignment_map: Annotated[
        tuple[tuple[str, str | None], ...],
        T5x(hint=Sequence[tuple[str, str | None]] | None, default=None, read=_make_tuple),
        Only(mtf=()),
    ] = ()
    strict: Annotated[bool, Only(mtf=False)] = True
    fallback_to_scratch: Annotated[bool, Only(mtf=False)] = False
    variable_filter: Annotated[
        str | None,
        Only(t5x=None),
        Mtf("utils.tpu_estimator_model_fn.init_variable_filter", read=lambda value: value or ""),
    ] = None
    adapter: Annotated[str | None, Mtf("t0repro.jax_training.init_adapter")] = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, or all of several."""
        return (self.path,) if isinstance(self.path, str) else self.path


@arguments(mtf="utils.get_checkpoint_iterator")
@dataclasses.dataclass(frozen=True)
class CheckpointChoice:
    """The arguments of get_checkpoint_iterator other than the step itself.

    Attributes:
      skip_until: When the step is "all" or None, steps up to this one are skipped.
      stop_after: When the step is None, waiting ends with the first checkpoint at or after this
        step.
      find_closest: Whether a missing step is replaced by the nearest one; otherwise it is skipped.
    """

    skip_until: Annotated[int, Range(at_least=0)]
    stop_after: Annotated[int | None, Range(at_least=0)]
    find_closest: bool
