"""The calls that a T5X program makes, and the parts of a run that they describe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from t0repro.config.checkpoints import BestCheckpoints, RestoreConfig, SaveConfig
from t0repro.config.data import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.config.gin import door
from t0repro.config.gin.door import short
from t0repro.config.gin.folders import strip_folder
from t0repro.config.run import UserClass
from t0repro.config.settings import Argument, Found, check_field, read_fields
from t0repro.config.t5x.arguments import (
    CHECKPOINTER,
    KIND_OF,
    ONLY_T5X,
    REQUIRED,
    parameters_of,
    standard_name,
)
from t0repro.errors import UserError

_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A configurable as the program calls it.

    Attributes:
      configurable: Its name in `arguments`; of optax's functions, `optax.NAME`.
      arguments: Its arguments by name, calls in place of references, defaults included.
      selector, scopes: Its selector in gin, and the scopes in which it is called.
      bindable: The arguments that a gin file may bind.
      user_class: The user's class that stands for it, with the arguments that T5X's class lacks.
      places: Argument -> where it was set; filled in by `locate`.
    """

    configurable: str
    arguments: Mapping[str, Any]
    selector: str = ""
    scopes: tuple[str, ...] = ()
    bindable: frozenset[str] = frozenset()
    user_class: UserClass | None = None
    places: dict[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def __repr__(self) -> str:
        return f"@{self.shown}()"

    @property
    def shown(self) -> str:
        """Its name as the gin files write it, with the scope that tells it from its like."""
        named = [scope for scope in self.scopes if not scope.isupper()]
        return "/".join([*named, short(self.selector) or self.configurable])

    def refuse(
        self, argument: str, why: str, fix: str = ONLY_T5X, value: Any = REQUIRED
    ) -> NoReturn:
        """Raises an error for an unsupported value, with the place that set it.

        Args:
          argument: The argument.
          why: Why its value is not supported.
          fix: What to do.
          value: The value to show if it is not the argument's.
        """
        value = self.arguments.get(argument) if value is REQUIRED else value
        raise UserError(
            f"{self.shown}.{argument} = {value!r}: {why}", where=self.places.get(argument), fix=fix
        )

    def note(self, argument: str, what: str) -> str:
        """A line about an argument, with its place."""
        place = self.places.get(argument)
        return f"{f'{place}: ' if place else ''}{self.shown}.{argument}{what}"

    def walk(self) -> Iterator[Call]:
        """The call and the calls among its arguments, in their order, outermost first."""
        yield self
        for value in self.arguments.values():
            yield from calls_in(value)

    def locate(self, bindings: door.Bindings) -> None:
        """Fills in the places of its arguments and of those of the calls among them."""
        for call in self.walk():
            for argument in call.arguments:
                scopes = door.outer_scopes("/".join(call.scopes))
                place = bindings.find(scopes, call.selector, argument)
                default = f"default of {short(call.selector)}"
                call.places[argument] = strip_folder(place) if place else default
            loss = call.arguments.get("loss_fn")
            if not isinstance(loss, Call):
                continue
            for argument, value in loss.arguments.items():
                place = bindings.find(call.scopes, loss.selector, argument)
                if value is not None and place is not None:
                    call.places[argument] = strip_folder(place)

    @functools.cached_property
    def _by_name(self) -> dict[str, Call]:
        """The call and those among its arguments, by their names in the tables of fields."""
        calls: dict[str, Call] = {}
        for each in self.walk():
            # The first in the order of arguments: several have one name only in parts of a run.
            calls.setdefault(standard_name(each.configurable), each)
        return calls

    def find(self, name: str) -> tuple[Call, str] | None:
        """The call and the argument of a full name; None if nothing calls its configurable."""
        configurable, _, argument = name.rpartition(".")
        call = self._by_name.get(configurable)
        return None if call is None or argument not in call.arguments else (call, argument)

    def read(
        self, kind: type[_Kind], places: dict[str, str], prefix: str = "", **given: Any
    ) -> _Kind:
        """A part of a run, each field as the argument that its annotation names sets it.

        Args:
          kind: The part's dataclass.
          places: Dotted field -> where its value was set; what is read is added.
          prefix: Prefix of the part's dotted fields.
          **given: The values of fields that rules give.

        Raises:
          UserError: For a value of another type or outside its range, with its place.
        """

        def find(declared: Argument) -> Found | None:
            if (found := self.find(declared.name)) is None:
                return None
            call, argument = found
            return Found(
                lambda inside: build(call[argument], places, inside),
                call.places.get(argument),
                f"{call.shown}.{argument}",
            )

        return kind(**read_fields(kind, "t5x", find, places, prefix, given))


def call_with_defaults(configurable: str, **arguments: Any) -> Call:
    """A call that no gin file makes, with the defaults of the other arguments."""
    parameters = parameters_of(configurable)
    defaults = {name: each.default for name, each in parameters.items()}
    return Call(configurable, defaults | arguments, configurable, bindable=frozenset(parameters))


def calls_in(value: Any) -> Iterator[Call]:
    """The calls in a value, in lists and mappings too, outermost first."""
    if isinstance(value, Call):
        yield from value.walk()
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from calls_in(item)


def build(value: Any, places: dict[str, str], prefix: str) -> Any:
    """Parts of a run in place of the calls in a value; for the rest see `Call.read`."""
    if isinstance(value, Call):
        rule, kind = _RULES.get(value.configurable), KIND_OF.get(value.configurable)
        if rule is not None:
            return rule(value, places, prefix)
        return value if kind is None else value.read(kind, places, prefix)
    if isinstance(value, Mapping):
        return {key: build(item, places, prefix) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(build(item, places, prefix) for item in value)
    return value


def _dataset(call: Call, places: dict[str, str], prefix: str) -> SeqioDataConfig:
    if not isinstance(call["mixture_or_task_name"], str):
        call.refuse(
            "mixture_or_task_name",
            "it must be the name of a registered task or mixture.",
            "Register the task in a module that the gin file imports, and bind its name.",
        )
    if call["num_shards"] != 1 and prefix != "plan.train_data.":
        call.refuse(
            "num_shards",
            "only the data of a training run are divided into shards.",
            "Bind train/utils.DatasetConfig.num_shards.",
        )
    return call.read(SeqioDataConfig, places, prefix)


def _save(call: Call, places: dict[str, str], prefix: str) -> SaveConfig:
    """Which checkpoints to write and keep; in T5X, a class of its own keeps the best."""
    best, given = call["checkpointer_cls"], {}
    if isinstance(best, Call) and best.configurable == CHECKPOINTER:
        best = None
    if best is not None:
        if not isinstance(best, Call) or KIND_OF.get(best.configurable) is not BestCheckpoints:
            why = "checkpoints are read and written in one way, which keeps T5X's tree."
            call.refuse("checkpointer_cls", why)
        if not call["keep_period"]:
            period, where = best["force_keep_period"] or None, best.places.get("force_keep_period")
            shown = f"{best.shown}.force_keep_period"
            check_field(SaveConfig, "keep_period", period, where, shown, also=(0,))
            given = {"keep_period": period}
            if where is not None:
                places[f"{prefix}keep_period"] = where
    kept = build(best, places, f"{prefix}best.")
    return call.read(SaveConfig, places, prefix, best=kept, **given)


def _restore(call: Call, places: dict[str, str], prefix: str) -> RestoreConfig | None:
    """Where parameters come from; an empty list of paths, as in pretrain.gin, restores nothing."""
    if call["path"]:
        return call.read(RestoreConfig, places, prefix)
    if call["adapter"] is not None:
        call.refuse("adapter", "its base is not given.", "Set the path to the base.")
    return None


_LOGGERS: Mapping[str, Any] = {
    "seqio.PyLoggingLogger": "py",
    "seqio.TensorBoardLogger": "tensorboard",
    "seqio.JSONLogger": "json",
}


def _evaluator(call: Call, places: dict[str, str], prefix: str) -> EvaluatorConfig:
    loggers = []
    for logger in call["logger_cls"]:
        if not isinstance(logger, Call) or logger.configurable not in _LOGGERS:
            call.refuse("logger_cls", "the loggers are SeqIO's three.", value=logger)
        # Only the JSON logger has this argument.
        results = logger.arguments.get("write_n_results")
        if "write_n_results" in logger.places:
            places[f"{prefix}loggers.write_n_results"] = logger.places["write_n_results"]
        loggers.append(LoggerConfig(_LOGGERS[logger.configurable], logger["output_dir"], results))
    return call.read(EvaluatorConfig, places, prefix, loggers=tuple(loggers))


def _vocabulary(call: Call, places: dict[str, str], _: str) -> Any:
    """One of a model's vocabularies, of its inputs or of its outputs."""
    of_inputs = call.configurable == "models.get_input_vocabulary"
    arguments = call["model"].arguments
    name = "input_vocabulary" if of_inputs else "output_vocabulary"
    # A decoder-only model has one vocabulary.
    return build(arguments.get(name, arguments.get("vocabulary")), places, "")


_RULES: Mapping[str, Callable[[Call, dict[str, str], str], Any]] = {
    "utils.DatasetConfig": _dataset,
    "utils.SaveCheckpointConfig": _save,
    "utils.RestoreCheckpointConfig": _restore,
    "seqio.Evaluator": _evaluator,
    "trainer.BaseAction": lambda call, *_: call.user_class,
    "models.get_input_vocabulary": _vocabulary,
    "models.get_output_vocabulary": _vocabulary,
}
