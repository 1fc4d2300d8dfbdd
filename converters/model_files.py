"""What the files beside a checkpoint state about its model: its arithmetic, sizes and names.

A checkpoint's tensors do not show the arithmetic. transformers' directories state it in
config.json. For other checkpoints it is in the training run's gin file: `operative_config.gin`
beside them, or T5X's `config.gin`. Sizes and names in these files must be the checkpoint's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro.adapters import NAMES
from t0repro.config.gin_imports import Macro, Unresolved
from t0repro.config.run_config import ModelConfig
from t0repro.converters import adapter_files, hf, hf_config, mtf, sources, storage
from t0repro.converters.mtf import OPERATIVE_CONFIG
from t0repro.converters.tensors import CheckpointRef, StoredTensor
from t0repro.converters.witnesses import check_names, damaged
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

_OTHER_GIN = "Give the gin file of the model that the checkpoint holds."


def described(ref: CheckpointRef) -> CheckpointRef:
    """The checkpoint whose folder states a model's arithmetic; for an adapter's, maybe the base.

    A run that trained the adapter left its gin file beside it; without one, the base's counts.
    """
    if not adapter_files.is_adapter(ref) or any(
        storage.is_file(storage.join(ref.folder, name)) for name in _GIN_FILES
    ):
        return ref
    return described(sources.base_of(ref))


def version(ref: CheckpointRef) -> dict[str, Any]:
    """A fingerprint of a checkpoint's files, its base's, and the gin files beside them.

    It changes whenever opening the checkpoint again might give another model.
    """
    files = [storage.join(ref.folder, name) for name in _GIN_FILES]
    beside = {file: storage.stamp(file) for file in files if storage.is_file(file)}
    base = version(sources.base_of(ref)) if adapter_files.is_adapter(ref) else {}
    return sources.fingerprint(ref) | beside | base


def gin_text(ref: CheckpointRef, gin_file: str | os.PathLike[str] | None = None) -> str | None:
    """The gin text that a model was trained with; None if unknown.

    Args:
      ref: The checkpoint.
      gin_file: A file to read instead of the one beside the checkpoint.

    Raises:
      UserError: If the file cannot be read.
    """
    if gin_file is not None:
        try:
            return Path(gin_file).read_text()
        except OSError as error:
            raise _cannot_read_gin(gin_file, error) from None
    file = _gin_beside(ref)
    return storage.read(file).decode() if storage.is_file(file) else None


def arithmetic(
    ref: CheckpointRef,
    family: ModelShape,
    text: str | None,
    gin_file: str | os.PathLike[str] | None = None,
) -> hf_config.Computation:
    """A checkpoint's model arithmetic: activation, epsilon and so on.

    Args:
      ref: The checkpoint.
      family: The model's sizes.
      text: Its gin text, from `gin_text`; T5X's config.gin beside it supplies what this leaves out.
      gin_file: The text's file, if it is not the one beside the checkpoint.

    Raises:
      UserError: If config.json and the gin text disagree, or name arithmetic that no T5 here has.
    """
    bound = {}
    # T5X's file first: what a training run here wrote says more, and wins.
    if storage.is_file(config := _beside(ref, _T5X_CONFIG)):
        bound = _bound_arithmetic(storage.read(config).decode(), Path(config))
    if text:
        bound |= _bound_arithmetic(text, Path(gin_file or _gin_beside(ref)))
    if ref.format != "hf":
        # Only gin shows the activation of such a checkpoint; without it, assume the published ones:
        # T5 1.1's gated GELU and T5 1.0's ReLU.
        default = ("gelu", "linear") if family.gated else ("relu",)
        said = {field: found.value for field, found in bound.items()}
        return dataclasses.replace(hf_config.Computation(default), **said)
    found = hf.read_arithmetic(ref.path)
    for field, binding in bound.items():
        if binding.value != getattr(found, field):
            raise UserError(
                f"`{binding.line}` does not fit the model, whose {hf.CONFIG} says"
                f" {getattr(found, field)!r}.",
                where=binding.place,
                fix=_OTHER_GIN,
            )
    # A field that a gin file leaves unbound has gin's default, which may not be the model's.
    for field in ("epsilon", "max_distance"):
        default = getattr(hf_config.Computation, field)
        if text and field not in bound and getattr(found, field) != default:
            raise UserError(
                f"The gin file leaves the {field} at {default}, but {hf.CONFIG} says"
                f" {getattr(found, field)}.",
                where=str(gin_file or _gin_beside(ref)),
                fix=_OTHER_GIN,
            )
    return found


def open_configured(
    ref: CheckpointRef, model: ModelConfig, *, slots: bool = True, keep_shared: bool = False
) -> dict[str, StoredTensor]:
    """Opens a checkpoint in the form that a run's model needs; reads each tensor when it is used.

    If only the model has a position bias per layer, each layer gets the checkpoint's shared one.

    Args:
      ref: The checkpoint.
      model: The run's model.
      slots: False omits the optimizer slots.
      keep_shared: Whether the shared bias stays in the result too, for rules that name it.

    Raises:
      UserError: Like `check_configured` and `sources.open_any`.
    """
    check_configured(ref, model)
    tree = sources.open_tree(ref, slots=slots)
    repeated = repeated_biases(tree, model)
    shared = {name: tree[name] if keep_shared else tree.pop(name) for name in {*repeated.values()}}
    return tree | {name: shared[source] for name, source in repeated.items()}


def repeated_biases(names: Iterable[str], model: ModelConfig) -> dict[str, str]:
    """Finds the tensors to fill each layer's own position bias from a shared one.

    Args:
      names: Flat keys of a checkpoint.
      model: The model to fill.

    Returns:
      Key of a layer -> the checkpoint's key; empty unless only the model has a bias per layer.
    """
    if not model.position_bias_per_layer:
        return {}
    counts = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    found = {}
    # `coder/` ends either tower's name: the shared biases of encoder and decoder, and their slots.
    for key in [key for key in names if f"coder/{naming.RELATIVE_BIAS}" in key]:
        before, tower, after = key.partition("encoder" if "encoder" in key else "decoder")
        for layer in range(counts[tower]):
            found[f"{before}{tower}/layers_{layer}{after}"] = key
    return found


def check_configured(ref: CheckpointRef, model: ModelConfig) -> None:
    """Checks that a run's arithmetic matches the files beside the checkpoint that it reads.

    Args:
      ref: The checkpoint; without such files it passes. For an adapter's, see `described`.
      model: The run's model.

    Raises:
      UserError: Naming the field of config.json, or the gin file that sets the scaling of queries.
    """
    ref = described(ref)
    _check_query_scale(ref, model)
    if ref.format != "hf":
        return
    found = hf.read_arithmetic(ref.path)
    # Two names of one function: T5X's gin files say silu, `hf_config` says swish.
    swish = tuple("swish" if name == "silu" else name for name in model.activations)
    for field, configured, said in (
        ("feed_forward_proj", swish, found.activations),
        (
            "relative_attention_max_distance",
            model.relative_attention_max_distance,
            found.max_distance,
        ),
        ("layer_norm_epsilon", model.rms_norm_epsilon, found.epsilon),
    ):
        if configured != said:
            raise UserError(
                f"The run is configured for {configured!r}, but the checkpoint's {hf.CONFIG} says"
                f" {said!r}.",
                where=f"{storage.join(ref.path, hf.CONFIG)}, {field}",
                fix=f"Run with the {mtf.OPERATIVE_CONFIG} that `t0repro convert {ref.path} OUT --to"
                " jax` writes.",
            )


def _check_query_scale(ref: CheckpointRef, model: ModelConfig) -> None:
    """Checks that a run scales queries as the checkpoint's training did, since kernels differ."""
    said = _query_scale(ref)
    if said is None or said[0] == model.scale_queries:
        return
    scaled, place = said
    does = "divides" if model.scale_queries else "does not divide"
    binding = f"network.T5Config.scale_attn_logits = {scaled}"
    raise UserError(
        f"The run {does} queries by the root of head_dim; the checkpoint was trained"
        f" {'with' if scaled else 'without'} that division, so its query kernels do not fit.",
        where=f"{ref.path}; {place}",
        fix=f"Bind {binding}{', in a gin file of t5x.contrib.gpu.t5' if scaled else ''};"
        " or choose another checkpoint.",
    )


def _query_scale(ref: CheckpointRef) -> tuple[bool, str] | None:
    """Whether a training run scaled queries, and the place that shows it; None if unknown."""
    if ref.format in ("hf", "mtf"):  # neither library can
        return False, f"its format is {ref.format}"
    unbound = None
    for name in (mtf.OPERATIVE_CONFIG, _T5X_CONFIG):
        if not storage.is_file(file := _beside(ref, name)):
            continue
        text = storage.read(file).decode()
        bound = _bound_arithmetic(text, Path(file)).get("scale_queries")
        if bound is not None:
            return bool(bound.value), f"{bound.place}: {bound.line}"
        # A file that describes the model and leaves this unbound says T5X's default.
        if _describes_model(text, Path(file)):
            unbound = False, f"{file}, which leaves scale_attn_logits at False"
    return unbound


def _gin_beside(ref: CheckpointRef) -> str:
    return _beside(ref, mtf.OPERATIVE_CONFIG)


def _beside(ref: CheckpointRef, name: str) -> str:
    return storage.join(ref.folder, name)


# ---- Gin files, compared with a checkpoint -------------------------------------------------------

# Configurable and argument -> the family's field, in Mesh TensorFlow's names and in T5X's.
_FIELDS = {
    ("Unitransformer", "d_model"): "d_model",
    ("DenseReluDense", "hidden_size"): "d_ff",
    ("SelfAttention", "num_heads"): "num_heads",
    ("SelfAttention", "key_value_size"): "d_kv",
    ("SelfAttention", "relative_attention_num_buckets"): "relative_attention_num_buckets",
    ("SelfAttention", "relative_attention_type"): "position_bias_per_layer",
    ("EncDecAttention", "num_heads"): "num_heads",
    ("EncDecAttention", "key_value_size"): "d_kv",
    ("Unitransformer", "shared_embedding_and_softmax_weights"): "tied",
    ("make_layer_stack", "num_layers"): "layers",
    ("T5Config", "emb_dim"): "d_model",
    ("T5Config", "mlp_dim"): "d_ff",
    ("T5Config", "num_heads"): "num_heads",
    ("T5Config", "head_dim"): "d_kv",
    ("T5Config", "vocab_size"): "vocab_size",
    ("T5Config", "num_encoder_layers"): "num_encoder_layers",
    ("T5Config", "num_decoder_layers"): "num_decoder_layers",
    ("T5Config", "logits_via_embedding"): "tied",
}
# Bindings in mesh_tensorflow's defaults.gin, which every run reads first, from a model's macros.
_DEFAULTS = {
    ("Unitransformer", "d_model"): "d_model",
    ("DenseReluDense", "hidden_size"): "d_ff",
    ("SelfAttention", "num_heads"): "num_heads",
    ("SelfAttention", "key_value_size"): "d_kv",
    ("make_layer_stack", "num_layers"): "num_layers",
}
# Arithmetic that the weights do not show.
_ARITHMETIC = {
    ("DenseReluDense", "activation"): "activations",
    ("sublayer_rms_norm", "epsilon"): "epsilon",
    ("T5Config", "mlp_activations"): "activations",
    ("T5Config", "scale_attn_logits"): "scale_queries",
    ("jax_model", "relative_attention_max_distance"): "max_distance",
    ("jax_model", "exact_gelu"): "exact_gelu",
    ("jax_model", "scale_tied_logits"): "scale_tied_logits",
}
_TOWERS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A value that a gin file binds.

    Attributes:
      value: the value, macros resolved.
      line: the statement.
      place: `file:line`.
    """

    value: Any
    line: str
    place: str


def check_gin_file(path: str | os.PathLike[str], family: ModelShape) -> list[str]:
    """Checks that every size bound in a gin file equals the checkpoint's.

    Args:
      path: a gin file of either dialect, with the files that it includes.
      family: the checkpoint's model.

    Returns:
      The names of missing included files, whose bindings were therefore not checked.

    Raises:
      UserError: if the file cannot be read or is not gin, or a size differs; the message names the
        binding and its line.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot_read_gin(path, error) from None
    return check_gin_text(text, Path(path), family)


def check_gin_text(text: str, path: Path, family: ModelShape) -> list[str]:
    """Checks that every size bound in gin text equals the checkpoint's; see `check_gin_file`.

    Args:
      text: Text of either dialect; included files count if they are available.
      path: The text's file, for messages and for its includes.
      family: The checkpoint's model.
    """
    # Add these first, so that the file's own bindings win: model files set macros and leave these
    # bindings to defaults.gin.
    bindings = {
        ("", *argument): Bound(Macro(name), f"{'.'.join(argument)} = %{name}", "defaults.gin")
        for argument, name in _DEFAULTS.items()
    }
    unseen = list(_read_text(text, path, bindings, [path]))
    for (scope, configurable, argument), binding in bindings.items():
        field = _FIELDS.get((configurable, argument))
        resolved = _resolve(binding, bindings)
        if field is None or isinstance(resolved.value, Macro) or resolved.value is None:
            # A macro from a missing file cannot be compared.
            continue
        towers = [tower for tower in _TOWERS if tower in scope.split("/")]
        if not scope:
            # A binding for one tower holds there only.
            towers = [t for t in _TOWERS if (t, configurable, argument) not in bindings]
        value = resolved.value
        if field == "position_bias_per_layer":
            value = value == "bias" and _has_several_layers(family)
        for name in _family_fields(field, towers, family):
            if value != getattr(family, name):
                raise UserError(
                    f"`{resolved.line}` does not fit the checkpoint, whose {name} is"
                    f" {getattr(family, name)} ({binding.line}).",
                    where=resolved.place,
                    fix="Give the gin file of the model that the checkpoint holds, or copy the"
                    " whole checkpoint again.",
                )
    return unseen


def master_dtype(path: str | os.PathLike[str]) -> str | None:
    """The dtype that a gin file binds for Mesh TensorFlow's checkpoints; None if it binds none.

    Raises:
      UserError: if the file cannot be read or is not gin.
    """
    bindings: dict[tuple[str, str, str], Bound] = {}
    list(_read(Path(path), bindings, [Path(path)]))
    binding = bindings.get(("", "get_variable_dtype", "master_dtype"))
    value = _resolve(binding, bindings).value if binding else None
    return value if isinstance(value, str) else None


def bound_sentinels(text: str, path: Path) -> int | None:
    """The number of sentinels that gin text adds to a vocabulary's file; None if it adds none.

    0 says only that the file of the run's own vocabulary holds them, as T5's second file does.
    """
    bindings: dict[tuple[str, str, str], Bound] = {}
    list(_read_text(text, path, bindings, [path]))
    for (_, configurable, argument), binding in bindings.items():
        if (configurable, argument) == ("SentencePieceVocabulary", "extra_ids"):
            value = _resolve(binding, bindings).value
            return value if isinstance(value, int) and value > 0 else None
    return None


def _bound_arithmetic(text: str, path: Path) -> dict[str, Bound]:
    """The model arithmetic bound in gin text that the weights do not show.

    Args:
      text: Text of either dialect; included files count if they are available.
      path: The text's file, for messages and for its includes.

    Returns:
      Fields of `Arithmetic` that are bound for the whole model.
    """
    bindings: dict[tuple[str, str, str], Bound] = {}
    # The generator has to be run to its end for `bindings` to be filled.
    for _ in _read_text(text, path, bindings, [path]):
        pass  # an include that is missing
    bound = {}
    for (scope, configurable, argument), binding in bindings.items():
        field = _ARITHMETIC.get((configurable, argument))
        resolved = _resolve(binding, bindings)
        if field is None or scope or isinstance(resolved.value, Macro):
            continue
        value = resolved.value
        if field == "activations":
            names = (value,) if isinstance(value, str) else value
            # `silu` is the usual name for Mesh TensorFlow's `swish`.
            value = tuple("swish" if name == "silu" else name for name in names)
        bound[field] = Bound(value, resolved.line, resolved.place)
    exact_gelu, activations = bound.pop("exact_gelu", None), bound.get("activations")
    if activations and exact_gelu and exact_gelu.value:
        value = tuple("gelu_exact" if name == "gelu" else name for name in activations.value)
        bound["activations"] = dataclasses.replace(activations, value=value)
    return bound


def _describes_model(text: str, path: Path) -> bool:
    """Whether gin text binds a size of a model; see `_bound_arithmetic`."""
    bindings: dict[tuple[str, str, str], Bound] = {}
    list(_read_text(text, path, bindings, [path]))
    return any((configurable, argument) in _FIELDS for _, configurable, argument in bindings)


def without_adapter(text: str) -> str:
    """Gin text without its bindings of an adapter, for a whole model: comments and macros stay."""
    from gin import config_parser

    statements = list(config_parser.ConfigParser(text, Unresolved()))
    lines = text.splitlines(keepends=True)
    starts = [each.location.line_num - 1 for each in statements] + [len(lines)]
    removed = set[int]()
    for statement, start, end in zip(statements, starts, starts[1:], strict=False):
        if isinstance(statement, config_parser.BindingStatement) and _of_adapter(statement):
            removed.update(
                at
                for at in range(start, end)
                if lines[at].strip() and not lines[at].lstrip().startswith("#")
            )
    return "".join(line for at, line in enumerate(lines) if at not in removed)


def _of_adapter(statement: Any) -> bool:
    """Whether a binding names an adapter, or is one of its arguments; in either dialect."""
    module, _, configurable = statement.selector.rpartition(".")
    names_one = configurable in ("jax_training", "train") and statement.arg_name == "adapter"
    return names_one or (configurable in ("lora", "ia3") and module.endswith("adapters"))


def _has_several_layers(family: ModelShape) -> bool:
    """Whether a tower has several layers; the bias of a single layer equals a shared one."""
    return max(family.num_encoder_layers, family.num_decoder_layers) > 1


def _family_fields(field: str, towers: Sequence[str], family: ModelShape) -> list[str]:
    """The fields of the family that a binding sets; a stack's depth belongs to its tower."""
    if field != "layers":
        return [field]
    if family.decoder_only:
        return ["num_decoder_layers"]
    return [f"num_{tower}_layers" for tower in towers]


def _resolve(binding: Bound, bindings: dict[tuple[str, str, str], Bound]) -> Bound:
    """Follows a binding through macros to the one that holds the value."""
    for _ in range(10):  # a macro may refer to a macro; a circular one ends here
        if not isinstance(binding.value, Macro):
            break
        name = binding.value.name
        found = bindings.get(("", name, "")) or bindings.get((name, "macro", "value"))
        if found is None:
            break
        binding = found
    return binding


def _cannot_read_gin(
    path: str | os.PathLike[str], error: OSError | UnicodeDecodeError
) -> UserError:
    """The error for a gin file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else error
    return UserError(
        f"The gin file cannot be read: {reason}.",
        where=os.fspath(path),
        fix="Name the operative_config.gin, or another gin file, that the model was trained with.",
    )


def _read(
    path: Path, bindings: dict[tuple[str, str, str], Bound], including: Sequence[Path]
) -> Iterator[str]:
    """Adds a file's bindings, later ones overriding earlier ones; yields missing includes."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot_read_gin(path, error) from None
    yield from _read_text(text, path, bindings, including)


def _read_text(
    text: str,
    path: Path,
    bindings: dict[tuple[str, str, str], Bound],
    including: Sequence[Path],
) -> Iterator[str]:
    from gin import config_parser

    try:
        # Parse completely, since the parser raises only when it reaches the error.
        statements = list(config_parser.ConfigParser(text, Unresolved()))
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"The file is not a gin file: {error}", where=str(path), fix="Correct it there."
        ) from None
    for statement in statements:
        if isinstance(statement, config_parser.IncludeStatement):
            found = _find(statement.filename, path)
            if found is None or found in including:
                yield statement.filename
            else:
                yield from _read(found, bindings, [*including, found])
        elif isinstance(statement, config_parser.BindingStatement):
            location = statement.location
            # gin accepts a configurable with or without its module path.
            configurable = statement.selector.rpartition(".")[2]
            bindings[statement.scope, configurable, statement.arg_name] = Bound(
                statement.value, location.line_content.strip(), f"{path}:{location.line_num}"
            )


def _find(name: str, including: Path) -> Path | None:
    """An included file: next to the including one, in the working directory, or among t5's own."""
    folders = [including.parent, Path()]
    for package, *inside in (("t5", "models", "gin"), ("mesh_tensorflow", "transformer", "gin")):
        spec = importlib.util.find_spec(package)
        folders += [Path(p, *inside) for p in (spec and spec.submodule_search_locations) or ()]
    own = importlib.util.find_spec("t0repro.gin")
    folders += [Path(p) for p in (own and own.submodule_search_locations) or ()]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


# ---- What a run writes into its model_dir about its model, compared with a checkpoint there ------

# Separate from `witnesses`, with which the JAX core reads checkpoints: that core does not import
# gin.


_T5X_CONFIG = "config.gin"
_GIN_FILES = (OPERATIVE_CONFIG, _T5X_CONFIG)  # Mesh TensorFlow's and T5X's
_MODEL_INFO = "model-info.txt"  # T5X's list of variables
_VARIABLE = re.compile(r"Variable\s+(?:params/)?(\S+)\s+size")
_PARAMETERS_END = "Total number of parameters:"


def check_run_files(ref: CheckpointRef, family: ModelShape) -> None:
    """Checks that a checkpoint's model matches the files of a run beside it.

    Args:
      ref: The checkpoint.
      family: Its model.

    Raises:
      UserError: Naming the line that the model contradicts, or a file that cannot be read.
    """
    for name in _GIN_FILES:
        file = storage.join(ref.folder, name)
        if storage.is_file(file):
            check_gin_text(_text(file), Path(file), family)
    file = storage.join(ref.folder, _MODEL_INFO)
    if storage.is_file(file):
        _check_model_info(file, family)


def _text(file: str) -> str:
    try:
        return storage.read(file).decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"it is not UTF-8 ({error.reason})") from None


def _check_model_info(file: str, family: ModelShape) -> None:
    """Compares the parameters' names in T5X's list, which have no `target/` prefix."""
    parameters, end, _ = _text(file).partition(_PARAMETERS_END)
    found = (match[1] for match in map(_VARIABLE.match, parameters.splitlines()) if match)
    # An adapter's parameters stand among the base's; here they are merged.
    named = {name for name in found if name.rpartition("/")[2] not in NAMES}
    # A scanned tree has other names, and another kind of list shows nothing about this one.
    if end and named and not any(re.match(r"(encoder|decoder)/\1/", name) for name in named):
        check_names(family.parameters(), named, file, lambda name: f"target/{name}")
