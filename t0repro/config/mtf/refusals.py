"""The bindings that a run refuses: of a wrong type, without an effect, or that JAX lacks.

Mesh TensorFlow takes any text for True, even `'False'`, and gin accepts a binding in a scope that
nothing enters, where it has no effect. Mesh TensorFlow runs anyway, so there it is a warning; on
the JAX stack, where nobody depends on such bindings, it is an error. So is a binding that the JAX
stack does not read, unless it binds a default. Most that it reads are the arguments that the run's
settings name in their annotations (t0repro.config.settings).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, get_args

from t0repro.config.configuration import NotOnJax
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, Key
from t0repro.config.gin.folders import is_shipped
from t0repro.config.model import ModelType
from t0repro.config.mtf.arguments import DECODER_ONLY, TOWERS, Arguments, full_name, scopes_read
from t0repro.config.mtf.optimizer import OPTIMIZERS, SCHEDULES
from t0repro.config.optimizer import SCHEDULE_RANGES
from t0repro.config.run import MeshEvalRun, TextRun, TrainRun
from t0repro.config.settings import arguments_of, describe_type, fits, list_parts
from t0repro.errors import UserError, nearest_names

# Arguments whose defaults do not show that they are lists or functions.
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("sublayers_initial", "sublayers_per_layer", "sublayers_final"),
                    Sequence[Callable] | None),
    **dict.fromkeys(("exclude_from_parameter_scale", "exclude_from_weight_decay",
                     "stacked_dim_names"), Sequence[str] | None),
    **dict.fromkeys(("train_dataset_fn", "eval_dataset_fn", "score_dataset_fn"), Callable | None),
    "activation": str | Sequence[str],
    "beam_size": int,
    "init_variable_filter": str | None,
    "num_heads": int,
    "sampling_keep_top_k": int,
    "save_checkpoints_steps": int,
    "tokens_per_microbatch_per_replica": int | None,
    "vocab_divisor": int,
}  # fmt: skip
# The JAX stack reads these from the object made in the scope, or in the scope of a reference.
_READ_IN_ANY_SCOPE = (
    "mesh_tensorflow.transformer.transformer_layers.", "mesh_tensorflow.optimize.",
    "mesh_tensorflow.transformer.learning_rate_schedules.",
    "t5.models.mesh_transformer.mesh_train_dataset_fn",
    "t5.models.mesh_transformer.mesh_eval_dataset_fn",
)  # fmt: skip
_OR_WARNED = ", or run with --backend=mtf, which only warns of it"
_PACKAGES = ("mesh_tensorflow.", "t5.", "t0repro.", "Bitransformer.", "Unitransformer.")
# Configurables all of whose arguments rules read, or of which nothing depends on one.
_ANY_ARGUMENT = (
    "utils.serialize_num_microbatches", "utils.auto_train_steps", "utils.tpu_mesh_shape",
    "utils.get_variable_dtype", "mesh_transformer.get_vocabulary", "ops.rewrite_stack_variables",
    "optimize.adafactor_decay_rate_pow",
)  # fmt: skip
# Configurables of Mesh TensorFlow's whose every argument must have its default.
_DEFAULTS_ALONE = (
    "utils.score_with_estimator", "utils.init_checkpoint_variable_mapping",
    "utils.should_load_variable", "utils.decode", "utils.clean_decodes", "dataset.pack_dataset",
    "layers.unit_scaling_convention", "layers.VarianceScalingInitializer",
    "transformer.Bitransformer", "transformer.VocabEmbedding",
    "transformer.get_vocab_embedding_cls", "transformer.shift_targets",
    "transformer.sublayer_residual", "transformer.sublayer_call_layer",
    "transformer.sublayer_mask_padding", "transformer_layers.enc_dec_attention",
    "transformer_layers.enc_dec_attention_bias",
)  # fmt: skip
# Arguments that set no field: rules read them, Mesh TensorFlow passes others itself, or nothing
# that the JAX stack computes depends on them.
_OTHERS: Mapping[str, set[str]] = {
    "utils.run": {
        # Read by rules.
        "vocabulary", "layout_rules", "total_run_steps",
        # Without an effect here.
        "autostack", "export_checkpoint_step", "export_path", "iterations_per_loop", "mesh_devices",
        "tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir",
    },
    "utils.tpu_estimator_model_fn": {
        "model_info_file", "tpu_summaries", "hierarchical_tiling_spec", "init_checkpoint",
    },
    "utils.infer_model": {"decode_fn"},
    "utils.score_from_strings": {"score_postprocess_fn"},
    "utils.score_from_dataset": {"score_dataset_fn", "score_postprocess_fn"},
    "Bitransformer.decode": {"variable_dtype"},
    "Unitransformer.sample_autoregressive": {
        "temperature", "sampling_keep_top_k", "variable_dtype", "has_partial_sequences",
        "encoder_output", "encoder_sequence_id", "encoder_inputs", "shared_params",
        "encoder_layer_outputs",
    },
    "beam_search.beam_search": {
        "alpha", "decode_length", "use_tpu", "dtype", "layout", "mesh_shape", "states",
    },
    "transformer.Unitransformer": {"max_length", "positional_embedding"},
    "transformer.LayerStack": {
        "sublayers_initial", "sublayers_per_layer", "sublayers_final", "dropout_rate",
    },
    "transformer.make_layer_stack": {"layers"},
    "transformer.make_bitransformer": {"decoder_name"},
    "transformer_layers.DenseReluDense": {"dropout_rate"},
    "transformer_layers.SelfAttention": {"dropout_rate"},
    "transformer_layers.EncDecAttention": {"num_heads", "key_value_size", "dropout_rate"},
    **{kind.gin_configurables["mtf"]: {"learning_rate"} for kind in OPTIMIZERS.values()},
    "optimize.AdafactorOptimizer": {"stacked_dim_names", "learning_rate"},
}  # fmt: skip


def _list_bound() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields scope, selector, and argument -> value as written, of all but macros."""
    for (scope, selector), arguments in door.bound().items():
        if selector not in (door.MACRO, "gin.constant"):
            yield scope, selector, arguments


def check_types(bindings: Bindings) -> None:
    """Checks values that would make Mesh TensorFlow's code fail, on either backend.

    Raises:
      UserError: for a value whose type is not its argument's, which is that of the default.
    """
    for scope, selector, arguments in _list_bound():
        for argument, raw in arguments.items():
            value, hint = door.follow_macros(raw), _TYPES.get(argument)
            if hint is None:
                default = _default(selector, argument)
                is_number = isinstance(default, int | float) and not isinstance(default, bool)
                # Some take None, and a later check tests whether a number is an integer.
                hint = float | None if is_number else Any
            # A reference's value is known only when it is called.
            known = value
            if isinstance(value, list | tuple):
                known = [x for x in value if not door.is_reference(door.follow_macros(x))]
            if not (door.is_reference(value) or fits(known, hint)):
                wanted = describe_type(hint)
                raise UserError(
                    f"{_short(selector)}.{argument} is {value!r}; it must be {wanted}.",
                    where=bindings.place((scope, selector, argument)),
                    fix=f"Bind {wanted}.",
                )


def list_misread(bindings: Bindings, model_type: str) -> Iterator[NotOnJax]:
    """Errors for bindings whose meaning differs from what they say, or that have no effect.

    Args:
      bindings: Where each binding was set.
      model_type: Mesh TensorFlow's, which decides in which scopes it builds the model.

    Yields:
      An error for each such binding, which a run on Mesh TensorFlow may print as a warning.
    """
    for scope, selector, arguments in _list_bound():
        for argument in arguments:
            key, where = (scope, selector, argument), bindings.place((scope, selector, argument))
            # As written: what the JAX stack does not read, it need not be able to call.
            value = door.value_of(selector, argument, scope)
            is_bool = isinstance(value, bool) or door.is_reference(value)
            if _is_truth_value(selector, argument) and not is_bool:
                yield NotOnJax(
                    f"{_short(selector)}.{argument} is {value!r}, which is not a truth value; Mesh"
                    f" TensorFlow takes it for {bool(value)}.",
                    where=where,
                    fix=f"Bind True or False, without quotation marks{_OR_WARNED}.",
                )
            # Files of t5 and Mesh TensorFlow bind for models of every type, and a user's own code
            # may enter scopes of its own.
            elif model_type in get_args(ModelType) and selector.startswith(_PACKAGES):
                read = scopes_read(selector, model_type, argument)
                is_read = is_shipped(where or "") or _is_read(key, value, (*read, *bindings.scopes))
                if not (
                    is_read or _is_layered(key, read, bindings) or _is_twin(key, value, bindings)
                ):
                    yield _no_effect(key, read, bindings)


def refuse_unsupported(arguments: Arguments) -> None:
    """Refuses bindings that the JAX stack does not read: in their scope, or at all.

    Raises:
      NotOnJax: Naming the binding and its place.
    """
    _refuse_scoped_calls(arguments)
    for scope, selector, bound in _list_bound():
        known = known_bindings().get(selector)
        if known is None or known is ...:
            continue
        defaults = arguments.defaults(selector)
        # Compare with the signature's defaults: binding a default changes nothing.
        for argument in (each for each in bound if each not in known):
            value = arguments.read(selector, scope)[argument]
            if argument not in defaults or value != defaults[argument]:
                shown, fix = door.format_value(bound[argument]), "Change the binding"
                if argument in defaults:
                    fix = f"Bind {_short(selector)}.{argument} = {defaults[argument]!r}"
                arguments.refuse(f"{argument} = {shown}", argument, selector, scope, fix=fix)


def _refuse_scoped_calls(arguments: Arguments) -> None:
    """Refuses what is bound for a reference's scope, as `@a/save_scores` has one, but is not read.

    gin calls `@a/tpu_mesh_shape()` itself, in the scope; the JAX stack reads most of the rest in no
    scope.
    """
    references = (
        door.reference_to(part)
        for bound in door.bound().values()
        for value in bound.values()
        for part in door.flatten_value(value)
    )
    entered = {scope for each in references if each for scope in each.scopes if scope}
    for scope, selector, bound in _list_bound():
        read = scopes_read(selector, arguments.model_type)
        if scope not in entered or selector.startswith(_READ_IN_ANY_SCOPE) or scope in read:
            continue
        for argument in bound:
            key = (scope, selector, argument)
            if not _holds_anyway(key, door.value_of(selector, argument, scope), read):
                name = f"{_short(selector)}.{argument}"
                raise NotOnJax(
                    f"The JAX stack does not support {scope}/{name}: it reads {name} outside of the"
                    f" scope {scope!r}.",
                    where=arguments.bindings.place(key),
                    fix=f"Bind {name} without a scope, or run with --backend=mtf.",
                )


def refusal_on_mesh_tensorflow() -> UserError | None:
    """The error for a setting that gin binds to a value that Mesh TensorFlow does not support."""
    for selector in ("t0repro.jax_model", "t0repro.jax_training"):
        for name, value in door.resolve_bindings("", selector).items():
            # A setting bound to its default needs no support.
            if value != (default := _default(selector, name)):
                return UserError(
                    f"{selector}.{name} is {value!r}; Mesh TensorFlow supports only {default!r}.",
                    where=f"{selector}.{name}",
                    fix="Run with --backend=jax, or leave the binding out.",
                )
    return None


@functools.cache
def known_bindings() -> Mapping[str, set[str] | EllipsisType]:
    """Configurable -> its arguments that are read; `...` for all of them."""
    known: dict[str, set[str]] = {}
    for kind in list_parts(TrainRun, MeshEvalRun, TextRun):
        for each in arguments_of(kind, "mtf").values():
            configurable = each.configurable.rpartition("/")[2]
            # The JAX stack's own settings are all read.
            if not configurable.startswith("t0repro."):
                known.setdefault(full_name(configurable), set()).add(each.argument)
    for name, arguments in {**dict.fromkeys(_DEFAULTS_ALONE, ()), **_OTHERS}.items():
        known.setdefault(full_name(name), set()).update(arguments)
    every = dict.fromkeys(map(full_name, _ANY_ARGUMENT), ...)
    # `run` passes the others, the step and the number of steps.
    of_schedules = set(SCHEDULE_RANGES)
    return {**known, **dict.fromkeys(SCHEDULES, of_schedules), **every}


def _is_read(key: Key, value: Any, scopes: tuple[str, ...]) -> bool:
    """Whether a binding has an effect in one of the scopes, or only repeats the value there."""
    scope, selector, argument = key
    if any(_scope_in_effect(each, selector, argument) == scope for each in scopes):
        return True
    return _holds_anyway(key, value, scopes)


def _holds_anyway(key: Key, value: Any, scopes: tuple[str, ...]) -> bool:
    """Whether an argument has the value in these scopes too."""
    _, selector, argument = key
    default = _default(selector, argument)
    in_scopes = (door.raw_bindings(selector, each).get(argument, default) for each in scopes)
    return all(door.follow_macros(each) == value for each in in_scopes)


def _is_truth_value(selector: str, argument: str) -> bool:
    """Whether an argument is declared so; Mesh TensorFlow's show it by their defaults alone."""
    parameter = inspect.signature(door.function_of(selector)).parameters.get(argument)
    return parameter is not None and (
        isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")
    )


def _default(selector: str, argument: str) -> Any:
    parameters = inspect.signature(door.function_of(selector)).parameters
    # A misspelled name has no default if the class takes any keyword.
    return parameters[argument].default if argument in parameters else inspect.Parameter.empty


def _is_twin(key: Key, value: Any, bindings: Bindings) -> bool:
    """Whether a binding for the encoder stands beside the decoder's, as gin itself writes it.

    An operative config has every argument of both towers, whichever of them uses it. The answer is
    no where the author wanted the encoder's to take effect: see `_is_layered`.
    """
    scope, selector, argument = key
    tower = ("encoder", full_name("transformer.Unitransformer"))
    if (scope, selector) != tower or argument not in DECODER_ONLY:
        return False
    if value == _default(selector, argument):
        return True
    return _prevails(bindings.place(("decoder", selector, argument)), key, bindings)


def _is_layered(key: Key, read: tuple[str, ...], bindings: Bindings) -> bool:
    """Whether narrower bindings override this one, as its author may intend.

    Every operative config has such layers. The answer is no if the narrower binding is in a file of
    t5 or Mesh TensorFlow, or in any file while this one is on the command line: then the author
    wanted this one to take effect.
    """
    scope, selector, argument = key
    winners = {_scope_in_effect(each, selector, argument) for each in read}
    if not all(winner is not None and winner.startswith(scope) for winner in winners):
        return False
    places = [bindings.place((winner or "", selector, argument)) for winner in winners]
    return all(_prevails(place, key, bindings) for place in places)


def _prevails(place: str | None, key: Key, bindings: Bindings) -> bool:
    """Whether a binding at a place is one that the author of another may have wanted to win."""
    if place is None or is_shipped(place):
        return False
    return "gin_param" in place or "gin_param" not in (bindings.place(key) or "")


def _scope_in_effect(scope: str, selector: str, argument: str) -> str | None:
    """The innermost scope enclosing `scope` that binds the argument; None if none does."""
    around = reversed(door.outer_scopes(scope))
    return next((x for x in around if argument in door.bound().get((x, selector), {})), None)


def _short(selector: str) -> str:
    return selector.rpartition(".")[2]


def _no_effect(key: Key, read: tuple[str, ...], bindings: Bindings) -> NotOnJax:
    scope, selector, argument = key
    name = f"{_short(selector)}.{argument}"
    ways = [f"{each}/{name}" if each else name for each in read]
    winner = _scope_in_effect(read[0], selector, argument)
    if not scope and winner is not None:
        place = bindings.find((winner,), selector, argument)
        why = f"{ways[0]} is bound too, at {place}, and wins"
    else:
        known = dict.fromkeys((*read, *TOWERS, *bindings.scopes))
        near = nearest_names(scope, [each for each in known if each not in ("", scope)], 2)
        why = f"Mesh TensorFlow never reads it in the scope {scope!r} (nearest scopes: {near})"
    return NotOnJax(
        f"{scope}{'/' if scope else ''}{name} has no effect: {why}.",
        where=bindings.place(key),
        fix=f"Bind {' or '.join(ways)}{_OR_WARNED}.",
    )
