"""The arguments that gin's configuration gives Mesh TensorFlow's functions, and their places.

Nothing is called to read them: an argument's value is what gin binds in the scopes in which Mesh
TensorFlow calls its configurable, or its default. Configurables have short names here, such as
`utils.run`, as in gin files.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import gin
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, Reference
from t0repro.config.mtf.stand_ins import read_signatures
from t0repro.config.settings import Argument, Found, read_fields
from t0repro.errors import UserError

_Settings = TypeVar("_Settings")


@functools.cache
def full_name(name: str) -> str:
    """The recorded selector that gin finds for a name such as `utils.run`."""
    selectors = [x for x in read_signatures()["configurables"] if f".{x}".endswith(f".{name}")]
    return name if name in selectors or len(selectors) != 1 else selectors[0]


# The scopes in which an encoder-decoder model reads its configurables. Constructors run in their
# tower's scope. Everything else, such as sublayers and optimizers, runs outside of both scopes.
TOWERS = ("encoder", "decoder")
TOWER_SCOPES: Mapping[str, tuple[str, ...]] = {
    full_name(name): TOWERS
    for name in (
        "transformer.make_layer_stack", "transformer.LayerStack", "transformer.Unitransformer",
        "transformer_layers.DenseReluDense", "transformer_layers.SelfAttention",
    )
} | {full_name("transformer_layers.EncDecAttention"): ("decoder",)}  # fmt: skip
# Arguments that the encoder's constructor accepts but never uses: it computes no logits or loss.
DECODER_ONLY: frozenset[str] = frozenset({
    "label_smoothing", "z_loss", "loss_denominator", "shared_embedding_and_softmax_weights",
    "loss_on_targets_only", "loss_fn",
})  # fmt: skip


def scopes_read(selector: str, model_type: str, argument: str | None = None) -> tuple[str, ...]:
    """The scopes in which Mesh TensorFlow calls a configurable; "" means no scope.

    Args:
      selector: The configurable, by its full name.
      model_type: Mesh TensorFlow's; a language model's only tower is built in no scope.
      argument: Only the scopes in which this argument has an effect.
    """
    if model_type != "bitransformer":
        return ("",)
    if selector == full_name("transformer.Unitransformer") and argument in DECODER_ONLY:
        return ("decoder",)
    return TOWER_SCOPES.get(selector, ("",))


class Arguments:
    """Reads arguments and notes where each was set.

    Attributes:
      bindings: gin's bindings and their places.
      provenance: Field of the run -> where its value was set.
      run: The arguments of `utils.run`.
    """

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.provenance: dict[str, str] = {}
        self._read: dict[tuple[str, str], Mapping[str, Any]] = {}
        try:
            self.run = self.read("utils.run")
        # gin calls @tpu_mesh_shape() for its value; the call fails if no topology is bound.
        except RuntimeError as error:
            if "tpu_mesh_shape" not in str(error):
                raise
            raise UserError(
                f"{str(error).splitlines()[0]}.",
                where=self.place("mesh_shape"),
                fix='Add --gin_param="utils.run.mesh_shape = []", which divides the batch among all'
                " devices; or --gin_param=\"utils.run.mesh_shape = 'batch:4,model:2'\", for 8"
                " devices, of which 2 share each layer; or, to count a TPU's replicas,"
                " --gin_param=\"utils.tpu_mesh_shape.tpu_topology = 'v3-8'\".",
            ) from error
        self.model_type: str = self.run["model_type"]

    def read(self, name: str, scope: str = "") -> Mapping[str, Any]:
        """A configurable's arguments in a scoped call: defaults, then bindings.

        An argument that is required and not bound is missing.
        """
        if (name, scope) not in self._read:
            bound = door.resolve_bindings(scope, full_name(name))
            self._read[name, scope] = {**self.defaults(name), **bound}
        return self._read[name, scope]

    def defaults(self, name: str) -> dict[str, Any]:
        """A configurable's arguments that have a default."""
        parameters = inspect.signature(door.function_of(full_name(name))).parameters.values()
        return {
            each.name: each.default
            for each in parameters
            if each.default is not each.empty and each.default is not gin.REQUIRED
        }

    def reference(self, name: str, argument: str, scope: str = "") -> Reference | None:
        """The configurable that an argument is bound to, not called; None for any other value."""
        return door.reference_to(door.value_of(full_name(name), argument, scope))

    def place(self, argument: str, name: str = "utils.run", scope: str = "") -> str | None:
        """Where an argument is bound, in a scope or without one; None if it is not."""
        return self.bindings.find((scope,), full_name(name), argument)

    def note(self, field: str, name: str, argument: str, *scopes: str) -> None:
        """Notes that a field of the run takes its value from an argument.

        Args:
          field: The field.
          name: The configurable.
          argument: Its argument.
          scopes: The scopes in which it is read, the innermost last.
        """
        self.provenance[field] = self.bindings.source(scopes, full_name(name), argument)

    def settings(
        self, kind: type[_Settings], prefix: str, scope: str | None = None, **rules: Any
    ) -> _Settings:
        """An object of a class of settings; for the arguments see `values`."""
        return kind(**self.values(kind, prefix, scope, **rules))

    def values(
        self, kind: type, prefix: str, scope: str | None = None, **rules: Any
    ) -> dict[str, Any]:
        """Field -> value, of a class of settings: the argument that its annotation names.

        Args:
          kind: The dataclass.
          prefix: Of its fields' names in the provenance, such as "model.".
          scope: In which its configurables are called; None for where Mesh TensorFlow calls them.
          rules: The values of fields for which the argument itself is not the value.
        """

        def find(declared: Argument) -> Found:
            argument, (tower, _, name) = declared.argument, declared.configurable.rpartition("/")
            selector = full_name(name)
            called_in = scope or scopes_read(selector, self.model_type, argument)[-1]
            if tower and self.model_type == "bitransformer":
                called_in = tower
            return Found(
                lambda _: self.read(name, called_in)[argument],
                self.bindings.source(door.outer_scopes(called_in), selector, argument),
                f"{name}.{argument}",
            )

        return read_fields(kind, "mtf", find, self.provenance, prefix, rules)

    def require(self, name: str, argument: str, *, none_is_missing: bool = True) -> Any:
        """An argument that the run's mode needs.

        Raises:
          UserError: If it is not bound.
        """
        value = self.read(name).get(argument)
        if value is None and (none_is_missing or argument not in self.read(name)):
            short = f"{name.rpartition('.')[2]}.{argument}"
            raise UserError(
                f"{short} is not bound, and mode {self.run['mode']!r} needs it.",
                where=self.place("mode"),
                fix=f'Add --gin_param="{short} = ...", or t5\'s gin file of the mode '
                "(infer.gin, score_from_file.gin, score_from_task.gin).",
            )
        return value

    def refuse(
        self,
        what: str,
        argument: str,
        name: str = "utils.run",
        *scopes: str,
        fix: str = "Change the binding",
    ) -> NoReturn:
        """Raises NotOnJax, naming what is unsupported and the place that binds it.

        Args:
          what: What the JAX stack does not support.
          argument: The argument that asks for it.
          name: The configurable.
          scopes: Where it is looked for, the innermost last; by default in either
            tower, the encoder's first.
          fix: What to do instead of running on Mesh TensorFlow.
        """
        selector = full_name(name)
        raise NotOnJax(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            where=self.bindings.source(scopes or TOWERS[::-1], selector, argument),
            fix=f"{fix}, or run with --backend=mtf.",
        )
