"""The arguments of a T5X run, as the reader of settings asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from t0repro.config.checkpoints import BestCheckpoints, RestoreConfig, SaveConfig
from t0repro.config.data import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.config.names import Dialect
from t0repro.config.read import Setting, read
from t0repro.config.t5x.arguments import KIND_OF, standard_name
from t0repro.config.t5x.calls import Call, is_standard


class T5xSource:
    """The calls of a program, and of a part of it.

    Args:
      call: The program, or the call of a part.
      places: Dotted field -> where its value was set; what is read is added.
    """

    dialect: ClassVar[Dialect] = "t5x"

    def __init__(self, call: Call, places: dict[str, str]):
        self.places = places
        self._calls: dict[str, Call] = {}
        for each in call.walk():
            # The first in the order of arguments: several have one name only in parts of a run.
            self._calls.setdefault(standard_name(each.configurable), each)

    def below(self, call: Call) -> T5xSource:
        """The arguments of a part."""
        return T5xSource(call, self.places)

    def find(self, name: str) -> Setting | None:
        """An argument by its full name; None if the run does not call its configurable."""
        configurable, _, argument = name.rpartition(".")
        call = self._calls.get(configurable)
        if call is None or argument not in call.arguments:
            return None
        return Setting(f"{call.shown}.{argument}", call[argument], call.places.get(argument))

    def build(self, value: Any, prefix: str) -> Any:
        """Parts of a run in place of the calls in a value."""
        if isinstance(value, Call):
            rule = _RULES.get(value.configurable)
            if rule is not None:
                return rule(value, self.below(value), prefix)
            kind = KIND_OF.get(value.configurable)
            return value if kind is None else read(kind, self.below(value), self.places, prefix)
        if isinstance(value, Mapping):
            return {key: self.build(item, prefix) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return tuple(self.build(item, prefix) for item in value)
        return value


def _dataset(call: Call, source: T5xSource, prefix: str) -> SeqioDataConfig:
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
    return read(SeqioDataConfig, source, source.places, prefix)


def _save(call: Call, source: T5xSource, prefix: str) -> SaveConfig:
    """Which checkpoints to write and keep; in T5X, a class of its own keeps the best."""
    best, keep_period = call["checkpointer_cls"], call["keep_period"]
    if is_standard(best, "checkpointer_cls"):
        best = None
    if best is not None:
        if not isinstance(best, Call) or KIND_OF.get(best.configurable) is not BestCheckpoints:
            why = "checkpoints are read and written in one way, which keeps T5X's tree."
            call.refuse("checkpointer_cls", why)
        keep_period = keep_period or best["force_keep_period"]
    return read(
        SaveConfig,
        source,
        source.places,
        prefix,
        best=source.build(best, f"{prefix}best."),
        keep_period=keep_period or None,
    )


def _restore(call: Call, source: T5xSource, prefix: str) -> RestoreConfig | None:
    """Where parameters come from; an empty list of paths, as in pretrain.gin, restores nothing."""
    if call["path"]:
        return read(RestoreConfig, source, source.places, prefix)
    if call["adapter"] is not None:
        call.refuse("adapter", "its base is not given.", "Set the path to the base.")
    return None


_LOGGERS: Mapping[str, Any] = {
    "seqio.PyLoggingLogger": "py",
    "seqio.TensorBoardLogger": "tensorboard",
    "seqio.JSONLogger": "json",
}


def _evaluator(call: Call, source: T5xSource, prefix: str) -> EvaluatorConfig:
    loggers = []
    for logger in call["logger_cls"]:
        if not isinstance(logger, Call) or logger.configurable not in _LOGGERS:
            call.refuse("logger_cls", "the loggers are SeqIO's three.", value=logger)
        # Only the JSON logger has this argument.
        results = logger.arguments.get("write_n_results")
        if "write_n_results" in logger.places:
            place = logger.places["write_n_results"]
            source.places[f"{prefix}loggers.write_n_results"] = place
        loggers.append(LoggerConfig(_LOGGERS[logger.configurable], logger["output_dir"], results))
    return read(EvaluatorConfig, source, source.places, prefix, loggers=tuple(loggers))


def _vocabulary(call: Call, source: T5xSource, _: str) -> Any:
    """One of a model's vocabularies, of its inputs or of its outputs."""
    of_inputs = call.configurable == "models.get_input_vocabulary"
    return source.build(call["model"]["input_vocabulary" if of_inputs else "output_vocabulary"], "")


_RULES: Mapping[str, Callable[[Call, T5xSource, str], Any]] = {
    "utils.DatasetConfig": _dataset,
    "utils.SaveCheckpointConfig": _save,
    "utils.RestoreCheckpointConfig": _restore,
    "seqio.Evaluator": _evaluator,
    "trainer.BaseAction": lambda call, *_: call.user_class,
    "models.get_input_vocabulary": _vocabulary,
    "models.get_output_vocabulary": _vocabulary,
}
