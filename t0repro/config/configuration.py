"""The result of parsing a command line in either gin dialect; nothing reads gin after that.

Either backend checks `RunInputs` before it computes anything. `Configuration` adds what the JAX
stack needs for the computation. Addresses that it names are checked here too.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from t0repro import storage
from t0repro.config.optimizer import MultiOptimizerConfig
from t0repro.config.ranges import place_of
from t0repro.config.run import CheckpointRun, MeshEvalRun, Run, TextRun, TrainRun
from t0repro.errors import UserError
from t0repro.storage import access, check_address, output_path, write_atomically
from t0repro.words import without_passwords

_Run = TypeVar("_Run", bound=Run, covariant=True)
Vocabularies = tuple[Any, Any]  # SeqIO's, for inputs and for targets


class NotOnJax(UserError):
    """A binding that only Mesh TensorFlow supports, not the JAX stack."""


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
        command = without_passwords(shlex.join(sys.argv))
        write_atomically(folder / (f"command.{count}" if count else "command"), command)
        if self.inputs.mode == "train":
            write_atomically(model_dir / "operative_config.gin", self.gin_text)


# ---- A run as a table: field, value and where the value was set ----------------------------


def render(config: Run) -> str:
    """One line per value: dotted field, value, and the file and line or override that set it."""
    rows = [
        (field, repr(value), place_of(field, config.provenance) or "")
        for field, value in flatten(config)
        if not field.startswith("provenance")
    ]
    return in_columns(rows)


def in_columns(rows: Sequence[tuple[str, str, str]]) -> str:
    """Names, values and places in three columns; a long value pushes its place to the right."""
    # Widths of fields and values; places come last and need none.
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{field:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {place}".rstrip()
        for field, value, place in rows
    )


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dataclasses with their dotted names, in declaration order."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            yield from flatten(item, f"{name}.")
        else:
            yield name, item


# ---- Settings refused with an adapter ------------------------------------------------------------

# What to do in place of a setting that an adapter refuses.
_INSTEAD = {
    "optimizer": "all of its parameters have one optimizer. Choose what it changes by its targets.",
    "plan.user_classes.model": "it is for this project's own T5.",
    "plan.restore.variable_filter": "its base is a whole checkpoint. Remove the filter.",
    "plan.restore.assignment_map": "its base is read as it is. Remove the map.",
    "plan.restore.fallback_to_scratch": "its base is a whole checkpoint. Leave it at False.",
    "plan.restore.dtype": "its base is read as it is. Bind adapters.lora.base_dtype or"
    " adapters.ia3.base_dtype, the type that it is held in.",
}


def check_adapter(config: TrainRun) -> None:
    """Raises a UserError for a setting that an adapter refuses, if the run trains one."""
    restore = config.plan.restore
    if config.model.adapter is None:
        if restore is None or restore.adapter is None:
            return
        raise UserError(
            f"The run trains the whole model, but {restore.adapter} is to be the start of an"
            " adapter.",
            where=config.provenance.get("plan.restore.adapter"),
            fix="Bind the adapter to be trained. To train the whole model from the adapter merged"
            " into its base, name the adapter's checkpoint as the one to restore.",
        )
    refused = {
        # Both choose parameters by name, which an adapter's targets do already.
        "optimizer": isinstance(config.optimizer, MultiOptimizerConfig)
        or bool(getattr(config.optimizer, "frozen", ())),
        "plan.user_classes.model": "model" in config.plan.user_classes,
        # The adapter records its base's hash, and later commands read the base unchanged.
        "plan.restore.variable_filter": bool(restore and restore.variable_filter),
        "plan.restore.assignment_map": bool(restore and restore.assignment_map),
        "plan.restore.fallback_to_scratch": bool(restore and restore.fallback_to_scratch),
        # T5X's finetune.gin binds float32, which rounds nothing.
        "plan.restore.dtype": bool(restore and restore.dtype not in (None, "float32")),
    }
    for field, is_refused in refused.items():
        if is_refused:
            raise UserError(
                f"An adapter cannot be trained with this setting ({field}): {_INSTEAD[field]}",
                where=config.provenance.get(field) or config.provenance.get("model.adapter"),
            )


# ---- Settings refused with a loss over answer choices --------------------------------------------


def check_choice_loss(config: TrainRun) -> None:
    """Raises a UserError for a setting that ChoiceLoss refuses, if the run has one."""
    if config.model.choice_loss is None:
        return
    data, places = config.plan.train_data, config.provenance
    refused = {
        # A row's choices are segments of the decoder that all read the row's one input.
        "model.model_type": config.model.decoder_only and "the model needs an encoder.",
        "plan.user_classes.model": "model" in config.plan.user_classes
        and "it is for this project's own T5.",
        "plan.train_eval_data": config.plan.train_eval_data is not None
        and "train_eval has no answer choices. Bind train_eval_dataset_cfg = None.",
        "plan.train_data.pack": bool(data and data.pack)
        and "a row holds one example with its choices. Bind pack = False.",
        "plan.train_data.use_cached": bool(data and data.use_cached)
        and "examples are rendered from their rows. Bind use_cached = False.",
        "plan.train_data.num_shards": bool(data and data.num_shards > 1)
        and "its examples are not divided into shards. Leave them at 1.",
    }
    for field, why in refused.items():
        if why:
            raise UserError(
                f"ChoiceLoss cannot be trained with this setting ({field}): {why}",
                where=places.get(field) or places.get("model.choice_loss"),
            )


# ---- Addresses refused before anything opens them ------------------------------------------------

# Otherwise they could only fail minutes later, or would become local folders: on a machine without
# credentials, TensorFlow looks for them over the network and retries. Nothing here touches the
# network: credentials come from a file or from a Google Cloud machine.


def check_addresses(inputs: RunInputs, *, jax: bool) -> None:
    """Refuses gs:// addresses that cannot be read, before TensorFlow spends minutes trying.

    Raises:
      UserError: Without credentials, or for a model_dir that the stack cannot write to.
    """
    check_model_dir(inputs.model_dir, jax=jax)
    access.check_credentials(inputs.model_dir, "--model_dir")
    storage.check_readable(inputs.init_checkpoint or "", "run.init_checkpoint")


def check_model_dir(model_dir: str, *, jax: bool) -> None:
    """Refuses a model_dir that cannot be written to.

    Raises:
      UserError: For an address that cannot be opened; on Mesh TensorFlow, for any but TensorFlow's
        own gs://.
    """
    _check_output(model_dir, "--model_dir", jax=jax)


def check_outputs(config: Run, *, jax: bool = True) -> None:
    """Refuses gin bindings that would write to an address; see `check_model_dir`.

    Raises:
      UserError: For an address, with the place of its binding.
    """
    bound = {
        "eval_summary_dir": isinstance(config, MeshEvalRun) and config.eval_summary_dir,
        "scores_filename": isinstance(config, CheckpointRun) and config.scores_filename,
        "text.output_filename": isinstance(config, TextRun)
        and getattr(config.text, "output_filename", None),
    }
    for field, path in bound.items():
        if path:
            _check_output(path, config.provenance.get(field, field), jax=jax)


def _check_output(path: str, where: str, *, jax: bool) -> None:
    scheme = storage.scheme_of(path)
    if jax or scheme is None:
        check_address(path, where)
    elif scheme != "gs":
        raise UserError(
            f"{path} cannot be written to: TensorFlow writes to local paths and gs:// addresses.",
            where=where,
            fix="Give one of these, or --backend=jax.",
        )
