"""Parses gin files, overrides and the Model API's flags as t5_mesh_transformer does."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, get_args

import gin
from t0repro import adapters
from t0repro.config import gin_door
from t0repro.config.choices import ChoiceLoss
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin_door import Bindings, record_bindings
from t0repro.config.gin_errors import check_references, configuration_errors
from t0repro.config.gin_imports import default_bindings, mesh_folders, restrict_imports
from t0repro.config.mtf import packages
from t0repro.config.mtf.packages import MESH_TRANSFORMER
from t0repro.config.run_config import Recompute
from t0repro.errors import UserError
from t0repro.files import check_address
from t0repro.tasks.registration import hand_to_seqio, load_tasks
from t0repro.tasks.task import add_cache_dirs, resolved_modules
from t0repro.words import printable

UTILS = "mesh_tensorflow.transformer.utils"
# On t5's own list until SeqIO took the vocabularies over; T5 1.0's operative configs have it.
_ONCE_DEPRECATED = ("t5.data.sentencepiece_vocabulary.SentencePieceVocabulary",)


@dataclasses.dataclass(frozen=True)
class MeshInputs:
    """The gin-related part of t5_mesh_transformer's command line.

    Attributes:
      skip_unknown: True to ignore every unknown configurable, or the names of those to ignore in
        addition to t5's own list of deprecated references.
      tfds_data_dir: TensorFlow Datasets' data folder, in place of each task's own.
      import_allowlist: modules that gin files may import; see gin_imports. None allows all.
    """

    model_dir: str
    gin_files: Sequence[str] = ()
    gin_params: Sequence[str] = ()
    location_prefixes: Sequence[str] = ()
    module_imports: Sequence[str] = ()
    cache_dirs: Sequence[str] = ()
    skip_unknown: bool | Sequence[str] = ()
    tfds_data_dir: str | None = None
    import_allowlist: Sequence[str] | None = None


def parse(inputs: MeshInputs, *, warn: bool = True) -> Bindings:
    """Fills gin's global configuration from the inputs, in mesh_transformer_main's order.

    Args:
      inputs: files, overrides and search paths.
      warn: whether to print a warning for each macro in a file that nothing reads.

    Raises:
      UserError: for any error of gin's parser, a module that cannot be imported, or a macro on the
        command line that nothing reads.
    """
    # Mesh TensorFlow and t5 do not import on a current TensorFlow unless they are patched first.
    if not packages.is_described():
        from t0repro import compat

        compat.install()
        from t0repro.tasks.seqio_tasks import read_t5s_vocabulary_as_ours

        read_t5s_vocabulary_as_ours()
    with configuration_errors():
        return _parse(inputs, warn)


def _parse(inputs: MeshInputs, warn: bool) -> Bindings:
    mesh_transformer = packages.module(MESH_TRANSFORMER)
    packages.module(UTILS)  # registers its configurables
    importlib.import_module("t0repro.config.mtf.parser")  # the same, if this is __main__
    _import_tasks(inputs.module_imports)

    skip: Any = inputs.skip_unknown
    if skip is not True:
        # t5's list always applies, whatever the user adds.
        skip = (*deprecated(mesh_transformer), *(skip or ()))
    # gin's state is global to the process, which may have parsed another command line before.
    gin.clear_config()
    for prefix in mesh_folders(inputs.location_prefixes):
        gin.add_config_file_search_path(prefix)
    gin_door.extend_readers()
    allowlist = inputs.import_allowlist
    # Modules of --module_import are allowed in gin files too.
    restrict_imports(None if allowlist is None else (*allowlist, *inputs.module_imports))
    for cache_dir in inputs.cache_dirs:
        check_address(cache_dir, "--additional_task_cache_dirs")
    # Parse defaults.gin first, so that files and parameters override it.
    with record_bindings() as bindings:
        gin.parse_config_files_and_bindings(
            [default_bindings(), *inputs.gin_files],
            list(inputs.gin_params),
            skip_unknown=skip,
            # Finalizing would lock the configuration before the vocabulary is bound.
            finalize_config=False,
        )
    gin_door.check_bound_addresses(bindings)
    # Released operative configs bind the vocabulary to functions that no longer exist. t5 overrides
    # that binding, so drop it before checking references.
    gin.bind_parameter("run.vocabulary", None)
    # t5 reads the mixture's macro by name, to find the vocabulary.
    for warning in check_references(bindings, read_by_t5=("MIXTURE_NAME",)):
        if warn:
            print(printable(f"warning: {warning}"), file=sys.stderr)
    # By now the place that binds the mixture's name is known.
    with configuration_errors(bindings):
        gin.bind_parameter("run.vocabulary", mesh_transformer.get_vocabulary())
    # This locks gin's configuration; later changes must unlock it explicitly.
    gin.finalize()
    flag = "--additional_task_cache_dirs"
    # After gin's files, as in t5's main, so that nothing that they import overrides it.
    add_cache_dirs(inputs.cache_dirs, flag)
    if inputs.tfds_data_dir:
        importlib.import_module("seqio").set_tfds_data_dir_override(inputs.tfds_data_dir)
    return bindings


def deprecated(mesh_transformer: Any) -> tuple[str, ...]:
    """The references that gin skips: those on the list of t5's module, or once on it."""
    return (*mesh_transformer.DEPRECATED_GIN_REFERENCES, *_ONCE_DEPRECATED)


def _import_tasks(modules: Sequence[str]) -> None:
    """Imports modules that register tasks; if the packages are described, so are the tasks."""
    if packages.is_described():
        load_tasks(modules, into_seqio=False)
        return
    hand_to_seqio()  # the tasks that an earlier attempt only described
    for module in resolved_modules(modules):
        importlib.import_module(module)


# ---- The arguments that gin's configuration amounts to -------------------------------------------


class RunArguments:
    """The arguments of `utils.run` and of the functions that it calls.

    Attributes:
      bindings: gin's bindings and their places.
      run: The arguments of `utils.run`.
      provenance: Field of the RunConfig -> where its value was set; filled by `note`.
      utils, mesh_transformer: Mesh TensorFlow's and t5's modules of these names.
    """

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.provenance: dict[str, str] = {}
        self.utils = packages.module(UTILS)
        self.mesh_transformer = packages.module(MESH_TRANSFORMER)
        self.run = self._run_arguments()

    def _run_arguments(self) -> dict[str, Any]:
        """The arguments of `utils.run`, including those gin computes, such as mesh_shape."""
        try:
            return self.arguments(f"{UTILS}.run", self.utils.run)
        # gin calls @tpu_mesh_shape() for its value; the call fails if no topology is bound.
        except RuntimeError as error:
            if "tpu_mesh_shape" not in str(error):
                raise
            raise UserError(
                f"{str(error).splitlines()[0]}.",
                where=self.bindings.find((), f"{UTILS}.run", "mesh_shape"),
                fix='Add --gin_param="utils.run.mesh_shape = []"; or, to count a TPU\'s replicas,'
                " --gin_param=\"utils.tpu_mesh_shape.tpu_topology = 'v3-8'\".",
            ) from error

    def arguments(self, selector: str, function: Any, scope: str = "") -> dict[str, Any]:
        """A configurable's arguments in a scoped call: defaults, then bindings."""
        signature = inspect.signature(function)
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
        }
        # Bindings win over defaults, as in a call through gin.
        return {**defaults, **gin_door.resolved(scope, selector)}

    def argument(self, selector: str, name: str) -> Any:
        """The value that an argument is bound to, or None; noted as the field of the same name."""
        self.note(name, selector, name)
        return gin_door.resolved("", selector).get(name)

    def note(self, field: str, selector: str, argument: str, scopes: tuple[str, ...] = ()) -> None:
        """Notes that a field of the RunConfig takes its value from an argument."""
        self.provenance[field] = self.bindings.source(scopes, selector, argument)

    def refuse(
        self, argument: str, what: str, selector: str = f"{UTILS}.run", scope: str = "decoder"
    ) -> NoReturn:
        """Raises NotOnJax, naming what is unsupported and the place that binds it."""
        raise NotOnJax(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            # The decoder's scope wins over a binding without one.
            where=self.bindings.source((scope,), selector, argument),
            fix="Remove the binding, or run with --backend=mtf.",
        )

    def place_of_run(self, argument: str) -> str | None:
        """Where an argument of `utils.run` is bound; None if it is not."""
        return self.bindings.find((), f"{UTILS}.run", argument)


# ---- Settings of the JAX stack that no gin file of Mesh TensorFlow has ---------------------------

# The model's settings exist in transformers' T5, so models from there may need them. Mesh
# TensorFlow refuses them all by name.


JAX_MODEL = "t0repro.jax_model"
JAX_TRAINING = "t0repro.jax_training"


# Importing this module registers it; the parser does so before it reads a file.
@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_model(
    relative_attention_max_distance: int = 128,
    exact_gelu: bool = False,
    scale_tied_logits: bool = True,
    recompute: str | None = None,
) -> dict[str, Any]:
    """The settings bound by gin, by name.

    Args:
      relative_attention_max_distance: As in `ModelConfig`.
      exact_gelu: Whether `gelu` is the one with the error function and not its tanh approximation.
      scale_tied_logits: As in `ModelConfig`.
      recompute: As in `ModelConfig`; None for `full` if `LayerStack.recompute_grads` is True.

    Raises:
      UserError: If there is no such rematerialization policy.
    """
    if recompute is not None and recompute not in (ways := get_args(Recompute)):
        raise UserError(
            f"{recompute!r} does not name what to recompute.",
            where=f"{JAX_MODEL}.recompute",
            fix=f"Bind one of {', '.join(ways)}.",
        )
    return {
        "relative_attention_max_distance": relative_attention_max_distance,
        "exact_gelu": exact_gelu,
        "scale_tied_logits": scale_tied_logits,
        "recompute": recompute,
    }


@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_training(
    weight_metrics_every: int = 0,
    data_shards: int = 1,
    adapter: adapters.Adapter | None = None,
    init_adapter: str | None = None,
    choice_loss: ChoiceLoss | None = None,
) -> dict[str, Any]:
    """The settings of a training run bound by gin, by name.

    Args:
      weight_metrics_every: As in `RunConfig`.
      data_shards: `TrainDataConfig.num_shards`.
      adapter: What is trained in place of the model's own parameters: `@adapters.lora()` or
        `@adapters.ia3()`.
      init_adapter: `RestoreConfig.adapter`.
      choice_loss: Losses over an example's answer choices: `@t0repro.ChoiceLoss()`.
    """
    return {
        "weight_metrics_every": weight_metrics_every,
        "data_shards": data_shards,
        "adapter": adapter,
        "init_adapter": init_adapter,
        "choice_loss": choice_loss,
    }


for _function in (adapters.lora, adapters.ia3):
    gin.external_configurable(_function, module="t0repro.adapters")
gin.external_configurable(ChoiceLoss, module="t0repro")


def refuse_on_mesh_tensorflow() -> None:
    """Raises UserError if gin binds a setting to a value that Mesh TensorFlow does not support."""
    for selector, function in ((JAX_MODEL, jax_model), (JAX_TRAINING, jax_training)):
        parameters = inspect.signature(function).parameters
        for name, value in gin.get_bindings(selector).items():
            # A setting bound to its default needs no support.
            if value != parameters[name].default:
                raise UserError(
                    f"{selector}.{name} is {value!r}; Mesh TensorFlow supports"
                    f" only {parameters[name].default!r}.",
                    where=f"{selector}.{name}",
                    fix="Run with --backend=jax, or leave the binding out.",
                )


# ---- --use_model_api: flags of t5's Model API as the bindings of `run` that do the same ----------

#     --mode=train, finetune    run.mode = 'train'
#     --mode=eval               run.mode = 'eval'
#     --mode=predict            run.mode = 'infer'
#     --mode=score              run.mode = 'score_from_strings'
#
# As in t5.models.mtf_model.MtfModel, all modes but train read <model_dir>/operative_config.gin
# (finetune reads that of --pretrained_model_dir) after the command line's gin files and parameters.
# Bindings of `MtfModel` replace those of `run`. The evaluation writes the files of mode eval.

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


Flags = Any  # absl's, of t5_mesh_transformer
# Maps a directory and a step (None for the latest) to the checkpoint there.
FindCheckpoint = Callable[[str, int | None], FoundCheckpoint]


def parse_model_api(inputs: MeshInputs, flags: Any, find_checkpoint: FindCheckpoint) -> Bindings:
    """Fills gin's global configuration from the flags of the Model API.

    Args:
      inputs: gin files, parameters and search paths of the command line.
      flags: t5's parsed flags.
      find_checkpoint: finds the checkpoint that mode finetune starts from; not called in other
        modes.

    Raises:
      UserError: for flags that do not fit together, or an export.
    """
    check_mode(flags)
    if flags.mode in _EXPORTS:
        raise refused_export(flags.mode, "--mode")
    steps = checkpoint_steps(flags)
    parsed = parse(inputs)
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
        mesh_transformer = importlib.import_module(MESH_TRANSFORMER)
        # predict and score read texts: MtfModel then takes the vocabulary that gin binds.
        name = flags.mixture_or_task if flags.mode in ("train", "finetune", "eval") else None
        gin.bind_parameter("run.vocabulary", mesh_transformer.get_vocabulary(name))
    return Bindings(places, scopes=parsed.scopes | read.scopes | bound.scopes)


def check_mode(flags: Any) -> None:
    """Raises UserError if --mode is missing; absl has checked its name."""
    if not flags.mode:
        raise UserError(
            "--use_model_api needs a mode.",
            where="--mode",
            fix="Add --mode=train, finetune, eval, predict or score.",
        )


def refused_export(mode: str, where: str | None) -> NotOnJax:
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
    mesh_transformer = importlib.import_module(MESH_TRANSFORMER)
    gin.parse_config_file(path, skip_unknown=deprecated(mesh_transformer))


def _bind_model() -> None:
    """Binds MtfModel's bound values, or its defaults, to `run`."""
    importlib.import_module("t5.models.mtf_model")
    given: Mapping[str, Any] = gin_door.bound().get(("", _MODEL), {})
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
        return "\n".join([*common, *_training(flags, steps, find_checkpoint)])
    common += ["run.train_steps = 0", f"run.eval_checkpoint_step = {steps!r}"]
    return "\n".join([*common, *_evaluation(flags)])


def _training(
    flags: Any, steps: int | str | list[int], find_checkpoint: FindCheckpoint
) -> list[str]:
    train_steps, start = flags.train_steps, None
    if flags.mode == "finetune":
        found = find_checkpoint(flags.pretrained_model_dir, _pretrained_step(steps))
        if found.step is None:
            raise UserError(
                "The checkpoint's name does not say its step, from which training counts.",
                where=found.path,
                fix="Rename it to model.ckpt-<step>.",
            )
        # MtfModel counts from the checkpoint's step.
        train_steps, start = found.step + train_steps, found.path
    return [
        "run.mode = 'train'",
        "run.dataset_split = 'train'",
        "run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn",
        f"mesh_train_dataset_fn.mixture_or_task_name = {flags.mixture_or_task!r}",
        f"run.train_steps = {train_steps}",
        f"run.init_checkpoint = {start!r}",
    ]


def _pretrained_step(steps: int | str | list[int]) -> int | None:
    if steps == "all" or (isinstance(steps, list) and len(steps) != 1):
        raise UserError(
            "Fine-tuning starts from a single checkpoint.",
            where="--checkpoint_mode",
            fix="Give --checkpoint_mode=latest, or specific with one of --checkpoint_steps.",
        )
    return steps[0] if isinstance(steps, list) else None


def _evaluation(flags: Any) -> list[str]:
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
