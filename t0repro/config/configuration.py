"""The result of parsing a command line in either gin dialect; nothing reads gin after that.

Either backend checks `RunInputs` before it computes anything. `Configuration` adds what the JAX
stack needs for the computation.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

from t0repro.config.run import Run
from t0repro.config.settings import RULE, Mtf, Only, Range, arguments
from t0repro.errors import UserError
from t0repro.storage import output_path, write_atomically
from t0repro.words import remove_passwords

_Run = TypeVar("_Run", bound=Run, covariant=True)
Vocabularies = tuple[Any, Any]  # SeqIO's, for inputs and for targets


class NotOnJax(UserError):
    """A binding that only Mesh TensorFlow supports, not the JAX stack."""


@arguments(mtf="utils.run")
@dataclasses.dataclass(frozen=True)
class RunInputs:
    """The data a run reads and its batches, the same on both backends.

    Attributes:
      mode: The mode of `utils.run`; a backend refuses a mode that it does not support.
      mixture_or_task_name: The mode's data; None for text files and other dataset functions.
      eval_checkpoint_step: As in CheckpointRun.
      vocab_divisor: The embedding's rows are padded to a multiple of it.
      master_dtype: Dtype of Mesh TensorFlow's variables, and so of the parameters in its
        checkpoints.
      batch_size: Sequences in a global batch.
      sequence_length: Tokens per feature, or None for the longest example's.
      tpu_mesh: The device mesh that run.mesh_shape = @tpu_mesh_shape() derives from a TPU's
        topology, such as "batch:64,model:8"; None if the mesh is given directly or has one device.
      provenance: Field -> where its value was set.
    """

    mode: str
    model_dir: Annotated[str, Only(mtf=RULE)]
    split: Annotated[str, Mtf("dataset_split")]
    mixture_or_task_name: Annotated[str | None, Only(mtf=RULE)]
    use_cached: Annotated[bool, Only(mtf=RULE)]
    init_checkpoint: str | None
    eval_checkpoint_step: int | tuple[int, ...] | str | None
    # t5 gives a pair, or one vocabulary for both features.
    vocabularies: Annotated[
        Vocabularies, Mtf("vocabulary", read=lambda x: x if isinstance(x, tuple) else (x, x))
    ]
    vocab_divisor: Annotated[
        int, Range(at_least=1), Mtf("transformer.Unitransformer.vocab_divisor")
    ]
    master_dtype: Annotated[str, Mtf("utils.get_variable_dtype.master_dtype")]
    batch_size: int
    sequence_length: Mapping[str, int] | None
    num_microbatches: Annotated[
        int, Mtf("utils.serialize_num_microbatches.tokens_per_microbatch_per_replica")
    ]
    tpu_mesh: Annotated[str | None, Only(mtf=RULE)]
    provenance: Annotated[Mapping[str, str], Only(mtf=RULE)]


@dataclasses.dataclass(frozen=True)
class Configuration(Generic[_Run]):
    """A run as configured.

    Attributes:
      inputs: The part that is checked first.
      run_or_refusal: The run; or, if only Mesh TensorFlow supports the configuration, the
        error.
      misread: Bindings that Mesh TensorFlow interprets otherwise than they read; a run on it warns
        of them, and `run_or_refusal` is the first.
      gin_text: The complete configuration as gin writes it, for operative_config.gin.
      only_on_jax: The error for a setting that Mesh TensorFlow lacks, if one is bound.
      allow_changed: Whether to continue training in a model_dir even if settings changed
        (--allow_changed).
    """

    inputs: RunInputs
    # The error is kept rather than raised because the run may be for Mesh TensorFlow.
    run_or_refusal: _Run | NotOnJax
    gin_text: str
    misread: tuple[NotOnJax, ...] = ()
    only_on_jax: UserError | None = None
    allow_changed: bool = False

    @property
    def run(self) -> _Run:
        """The run for the JAX stack.

        Raises:
          NotOnJax: If only Mesh TensorFlow supports a binding, which the error names.
        """
        if isinstance(self.run_or_refusal, NotOnJax):
            raise self.run_or_refusal
        return self.run_or_refusal

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is misread, in lines; an imported module's own bindings have no place."""
        return tuple(": ".join(filter(None, (each.where, each.what))) for each in self.misread)

    @property
    def vocabularies(self) -> Vocabularies:
        """SeqIO's vocabularies for inputs and for targets."""
        return self.inputs.vocabularies

    def record_command(self) -> None:
        """Writes model_dir/commands/command[.N] and, when training, operative_config.gin."""
        model_dir = output_path(self.inputs.model_dir)
        folder = model_dir / "commands"
        # As t5 names them: command, command.1, command.2.
        count = len(list(folder.glob("command*"))) if folder.is_dir() else 0
        command = remove_passwords(shlex.join(sys.argv))
        write_atomically(folder / (f"command.{count}" if count else "command"), command)
        if self.inputs.mode == "train":
            write_atomically(model_dir / "operative_config.gin", self.gin_text)
