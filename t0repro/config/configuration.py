"""What a dialect of gin makes of a command line, once; no run reads gin after it.

`RunInputs` is what either backend checks before anything is computed. `Configuration` adds what the
JAX stack computes by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError

Vocabularies = tuple[Any, Any]  # SeqIO's, of inputs and of targets


class NotOnJax(UserError):
    """A binding asks for what Mesh TensorFlow does and the JAX stack does not."""


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """What a run reads and how much of it at a time, the same on both backends.

    Attributes:
      mode: `utils.run`'s; a mode that neither backend knows is refused by the backend.
      mixture_or_task_name: what the mode reads; None for text files and other dataset functions.
      eval_checkpoint_step: as in RunConfig.
      vocab_divisor: the embedding's rows are a multiple of it.
      master_dtype: the type of Mesh TensorFlow's variables, and so of its checkpoints' parameters.
      batch_size: sequences in a global batch.
      sequence_length: tokens per feature, or None to take the longest example's.
      tpu_mesh: the mesh that run.mesh_shape = @tpu_mesh_shape() makes of a TPU's topology, as
        "batch:64,model:8"; None where the mesh is given itself, or has one device.
      provenance: field -> where its value was set.
    """

    mode: str
    model_dir: str
    split: str
    mixture_or_task_name: str | None
    use_cached: bool
    init_checkpoint: str | None
    eval_checkpoint_step: int | tuple[int, ...] | str | None
    vocabularies: Vocabularies
    vocab_divisor: int
    master_dtype: str
    batch_size: int
    sequence_length: Mapping[str, int] | None
    num_microbatches: int
    tpu_mesh: str | None
    provenance: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A run as configured.

    Attributes:
      inputs: what is checked first.
      run_or_refusal: the RunConfig; or, where only Mesh TensorFlow does what is configured, the
        error that says so.
      gin_text: the whole configuration as gin writes it, for operative_config.gin.
      allow_changed: train on in a model_dir although settings changed (--allow_changed).
    """

    inputs: RunInputs
    run_or_refusal: RunConfig | NotOnJax
    gin_text: str
    allow_changed: bool = False

    @property
    def run(self) -> RunConfig:
        """What the JAX stack runs.

        Raises:
          NotOnJax: naming the binding that only Mesh TensorFlow does.
        """
        if isinstance(self.run_or_refusal, NotOnJax):
            raise self.run_or_refusal
        return self.run_or_refusal

    @property
    def vocabularies(self) -> Vocabularies:
        """SeqIO's vocabularies, of inputs and of targets."""
        return self.inputs.vocabularies
