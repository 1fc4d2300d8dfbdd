"""Bindings that Mesh TensorFlow reads differently from what they seem to say.

Mesh TensorFlow takes any text for True, even `'False'`, and gin accepts a binding in a scope that
nothing enters, where it has no effect. Mesh TensorFlow runs anyway, so there it is a warning; on
the JAX stack, where nobody depends on such bindings, it is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from t0repro.config.configuration import NotOnJax
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, Key
from t0repro.config.gin.folders import is_shipped
from t0repro.config.mtf.arguments import DECODER_ONLY, TOWERS, scopes_read
from t0repro.config.mtf.stand_ins import full_name
from t0repro.config.settings import alternatives, declared_arguments, describe_type, fits
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
    "num_heads": int,
    "sampling_keep_top_k": int,
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
_MODEL_TYPES = ("bitransformer", "lm", "delimited_lm")
_PACKAGES = ("mesh_tensorflow.", "t5.", "t0repro.", "Bitransformer.", "Unitransformer.")


def list_misread(bindings: Bindings, model_type: str) -> Iterator[NotOnJax]:
    """Errors for bindings whose meaning differs from what they say, or that have no effect.

    Args:
      bindings: Where each binding was set.
      model_type: Mesh TensorFlow's, which decides in which scopes it builds the model.

    Yields:
      An error for each such binding, which a run on Mesh TensorFlow may print as a warning.
    """
    for (scope, selector), arguments in door.bound().items():
        if selector in (door.MACRO, "gin.constant"):
            continue
        hints = declared_arguments(door.function_of(selector))
        for argument, value in door.resolve_bindings(scope, selector).items():
            if argument not in arguments:
                continue  # bound in an enclosing scope
            where = bindings.place((scope, selector, argument))
            hint = hints.get(argument)
            if bool in alternatives(hint) and not fits(value, hint):
                yield NotOnJax(
                    f"{_short(selector)}.{argument} is {value!r}, which is not a truth value; Mesh"
                    f" TensorFlow takes it for {bool(value)}.",
                    where=where,
                    fix=f"Bind True or False, without quotation marks{_OR_WARNED}.",
                )
            # Files of t5 and Mesh TensorFlow bind for models of every type, and a user's own code
            # may enter scopes of its own.
            elif model_type in _MODEL_TYPES and selector.startswith(_PACKAGES):
                read = scopes_read(selector, model_type, argument)
                key = (scope, selector, argument)
                is_read = is_shipped(where or "") or _is_read(key, value, (*read, *bindings.scopes))
                if not (
                    is_read or _is_layered(key, read, bindings) or _is_twin(key, value, bindings)
                ):
                    yield _no_effect(key, read, bindings)


def scoped_calls(bindings: Bindings, model_type: str) -> Iterator[NotOnJax]:
    """Bindings that Mesh TensorFlow reads because a reference such as `@a/save_scores` has a scope.

    gin calls `@a/tpu_mesh_shape()` itself, in the scope; the JAX stack reads most of the rest in no
    scope.

    Yields:
      An error for each such binding that this stack would not read in its scope.
    """
    references = (
        door.reference_to(part)
        for arguments in door.bound().values()
        for value in arguments.values()
        for part in door.flatten_value(value)
    )
    entered = {scope for each in references if each for scope in each.scopes if scope}
    for (scope, selector), arguments in door.bound().items():
        if scope not in entered or selector == door.MACRO:
            continue
        read = scopes_read(selector, model_type)
        if selector.startswith(_READ_IN_ANY_SCOPE) or scope in read:
            continue
        values = door.resolve_bindings(scope, selector)
        for argument in arguments:
            key = (scope, selector, argument)
            if not _holds_anyway(key, values[argument], read):
                name = f"{_short(selector)}.{argument}"
                yield NotOnJax(
                    f"The JAX stack does not support {scope}/{name}: it reads {name} outside of the"
                    f" scope {scope!r}.",
                    where=bindings.place(key),
                    fix=f"Bind {name} without a scope, or run with --backend=mtf.",
                )


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
    return all(door.resolve_bindings(x, selector).get(argument, default) == value for x in scopes)


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


def check_types(bindings: Bindings) -> None:
    """Checks values that would make Mesh TensorFlow's code fail, on either backend.

    Raises:
      UserError: for a value whose type is not its argument's, which is that of the default.
    """
    for (scope, selector), arguments in door.bound().items():
        if selector in (door.MACRO, "gin.constant"):
            continue
        parameters = inspect.signature(door.function_of(selector)).parameters
        for argument, raw in arguments.items():
            value = door.follow_macros(raw)
            hint = _TYPES.get(argument)
            if hint is None and argument in parameters:
                default = parameters[argument].default
                is_number = isinstance(default, int | float) and not isinstance(default, bool)
                # Some take None, and a later check tests whether a number is an integer.
                hint = float | None if is_number else None
            # A reference's value is known only when it is called.
            known = value
            if isinstance(value, list | tuple):
                known = [x for x in value if not door.is_reference(door.follow_macros(x))]
            if hint is None or door.is_reference(value) or fits(known, hint):
                continue
            wanted = describe_type(hint)
            raise UserError(
                f"{_short(selector)}.{argument} is {value!r}; it must be {wanted}.",
                where=bindings.place((scope, selector, argument)),
                fix=f"Bind {wanted}.",
            )


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
