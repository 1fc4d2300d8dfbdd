"""Translates a training run to the other dialect, and lists what that dialect cannot express."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.data import SeqioDataConfig, TrainDataConfig
from t0repro.config.optimizer import AdafactorConfig
from t0repro.config.run import TrainingPlan, TrainRun, to_seqio_config
from t0repro.config.settings import Dialect, arguments_of, fixed_values, shared_values
from t0repro.parameters.shape import ALL_HEURISTIC


@dataclasses.dataclass(frozen=True)
class Translation:
    """A dialect's gin file, in lines, and the values it leaves out.

    Attributes:
      header: Imports and includes, which come before the bindings.
      bindings: Bindings that override the included files.
      missing: Values that the dialect cannot express, in words.
    """

    header: tuple[str, ...]
    bindings: tuple[str, ...]
    missing: tuple[str, ...]


# The included files set what no value here sets: which layers exist, and which functions run.
_HEADER: dict[Dialect, tuple[str, ...]] = {
    "mtf": ("include 'dataset.gin'", "include 'models/t5.1.1.base.gin'"),
    "t5x": (
        "from __gin__ import dynamic_registration",
        "import __main__ as train_script",
        "import seqio",
        "from t5x import adafactor",
        "from t5x import models",
        "from t5x import partitioning",
        "from t5x import trainer",
        "from t5x import utils",
        "from t5x.examples.t5 import network",
        "include 't5x/examples/t5/t5_1_1/base.gin'",
        "include 't5x/configs/runs/pretrain.gin'",
    ),
}


class _Reference(str):
    """A reference to a configurable, which gin writes without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def translate(config: TrainRun, dialect: Dialect) -> Translation:
    """A training run's values as bindings of a dialect, whichever dialect they came from."""
    bindings: list[str] = []
    missing: list[str] = []
    parts = [part(config, dialect) for part in (_model, _optimizer, _schedule)]
    parts.append((_run_of_t5x if dialect == "t5x" else _run_of_mesh)(config))
    for name, value in itertools.chain(*parts):
        if value is _NOT_EXPRESSED:
            missing.append(name)
        else:
            bindings.append(f"{name} = {value!r}")
    return Translation(_HEADER[dialect], tuple(bindings), tuple(missing))


_NOT_EXPRESSED = object()
_Items = Iterator[tuple[str, Any]]
_Pairs = Sequence[tuple[str, Any]]


def _fields(
    part: Any,
    prefix: str,
    dialect: Dialect,
    rules: Mapping[str, Any] | None = None,
    *,
    always: Collection[str] = (),
    scope: str = "",
    with_macros: bool = True,
) -> _Items:
    """A part's fields as bindings of the arguments that set them.

    Args:
      part: The part.
      prefix: Of its fields' dotted names.
      dialect: The dialect.
      rules: Field -> the items to write for it instead.
      always: Fields to bind even at their default, because the included files bind them.
      scope: Of the arguments, such as "train/".
      with_macros: Whether to bind the macros through which the included files set arguments.
    """
    bound, fixed = arguments_of(type(part), dialect), fixed_values(type(part), dialect)
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if rules and field.name in rules:
            yield from rules[field.name]
        elif field.name not in bound:
            if value != fixed.get(field.name, value):
                yield f"{prefix}{field.name} = {value}", _NOT_EXPRESSED
        elif field.name in always or value != field.default:
            argument = bound[field.name]
            # Run files import the program's module under this name.
            module = "train_script." if argument.configurable == "train" else ""
            name = f"{scope}{module}{argument.name}"
            yield (argument.macro if with_macros else None) or name, value


def _model(config: TrainRun, dialect: Dialect) -> _Items:
    model, arithmetic = config.model, config.model.arithmetic
    # Without smoothing there is nothing to spare.
    spared: dict[str, Any] = {} if model.label_smoothing else {"smoothing_spares_target": ()}
    # Only inputs that attend in both directions see later positions.
    if not model.input_full_attention:
        spared["one_way_position_buckets"] = ()
    rules: dict[str, Any] = {
        "loss_denominator": _loss_denominator(config, dialect),
        "arithmetic": _fields(arithmetic, "model.arithmetic.", dialect, spared, always=_LOGITS),
        "recompute": _unless(not model.recomputes, f"model.recompute = {model.recompute}"),
        # Neither changes what is computed.
        "scan_layers": (),
        "norm_names": (),
    }
    for field in ("shared_towers", "position_bias_per_layer", "scale_queries"):
        rules[field] = _unless(not getattr(model, field), f"model.{field} = True")
    for field in ("adapter", "choice_loss"):
        rules[field] = _unless(getattr(model, field) is None, f"model.{field}")
    if dialect == "mtf":
        # gin takes a list for the gated form's activations and a name for a single one.
        names = list(model.activations)
        several = names if len(names) > 1 else names[0]
        rules |= {
            # Mesh TensorFlow takes it from the mixture's vocabulary.
            "vocab_size": (),
            "activations": [("transformer_layers.DenseReluDense.activation", several)],
            # Under the decoder's scope, like the binding in the included file, which would win
            # otherwise.
            "label_smoothing": [
                ("decoder/transformer.Unitransformer.label_smoothing", model.label_smoothing)
            ],
        }
    yield from _fields(model, "model.", dialect, rules)
    if dialect == "t5x":
        yield "network.T5Config.dtype", config.dtypes.activation


def _unless(expressed: bool, words: str) -> _Pairs:
    """Nothing, or the words for a value that the dialect cannot express."""
    return () if expressed else [(words, _NOT_EXPRESSED)]


def _loss_denominator(config: TrainRun, dialect: Dialect) -> _Items:
    denominator = config.model.loss_denominator
    if dialect == "t5x":
        # T5X's default is the plain sum (1); Mesh TensorFlow's, all targets of the batch.
        names = {None: "NUM_TOTAL_TARGET_TOKENS", 1.0: None}
        factor = names.get(denominator, denominator)  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield "models.EncoderDecoderModel.loss_normalizing_factor", factor
    elif isinstance(denominator, str):
        yield f"model.loss_denominator = {denominator}", _NOT_EXPRESSED
    elif denominator is not None:
        yield "transformer.Unitransformer.loss_denominator", denominator


def _optimizer(config: TrainRun, dialect: Dialect) -> _Items:
    optimizer = config.optimizer
    if not isinstance(optimizer, AdafactorConfig):
        yield f"optimizer = {type(optimizer).__name__}", _NOT_EXPRESSED
        return
    rules: dict[str, Any] = {}
    # The last two are parameter paths: Mesh TensorFlow's name patterns have been resolved.
    for field in ("factor_map", "exclude_from_parameter_scale", "frozen"):
        value = getattr(optimizer, field)
        rules[field] = _unless(value in ((), ALL_HEURISTIC), f"optimizer.{field} = {value}")
    if dialect == "t5x":
        # In T5X None means no momentum; 0.0 would add a slot for it.
        momentum = optimizer.beta1 if optimizer.has_momentum else None
        rules |= {"beta1": [("adafactor.Adafactor.beta1", momentum)], "momentum_slot": ()}
    every = [field.name for field in dataclasses.fields(optimizer)]
    yield from _fields(optimizer, "optimizer.", dialect, rules, always=every)


def _schedule(config: TrainRun, dialect: Dialect) -> _Items:
    schedule = config.schedule
    if schedule is None:
        return
    arguments, t5x = schedule.arguments, schedule.name == "create_learning_rate_scheduler"
    factors, rates = "utils.create_learning_rate_scheduler", "learning_rate_schedules"
    name, values = schedule.name, dict(arguments)
    if dialect == "t5x" and t5x:
        for argument, value in values.items():
            yield f"{factors}.{argument}", value
        return
    # A constant rate is the only schedule that both dialects can express.
    if dialect == "t5x" and name in ("constant_learning_rate", "constant"):
        yield f"{factors}.factors", "constant"
        # Mesh TensorFlow's two functions name it differently.
        (rate,) = arguments.values()
        yield f"{factors}.base_learning_rate", rate
        return
    if t5x and arguments.get("factors", "").strip() == "constant":
        name, values = "constant_learning_rate", {"learning_rate": arguments["base_learning_rate"]}
    elif dialect == "t5x" or t5x:
        yield f"schedule = {name}({values})", _NOT_EXPRESSED
        return
    if schedule.total_train_steps != config.train_steps:
        yield "utils.run.total_run_steps", schedule.total_train_steps
    if name == "adafactor_default":  # Adafactor's rate without a schedule
        yield "utils.run.learning_rate_schedule", None
        return
    yield "utils.run.learning_rate_schedule", _Reference(f"@{rates}.{name}")
    if name == "product_learning_rate":
        yield from _product(values, rates)
        return
    for argument, value in values.items():
        yield f"{rates}.{name}.{argument}", value


def _product(arguments: Mapping[str, Any], rates: str) -> _Items:
    """A product's factors: numbers, and functions, each in its own scope."""
    listed: list[Any] = []
    for index, factor in enumerate(arguments["factors"]):
        if not isinstance(factor, Mapping):
            listed.append(factor)
            continue
        # The same function may occur twice, with different arguments.
        place = f"factor_{index}/{rates}.{factor['name']}"
        listed.append(_Reference(f"@{place}"))
        for argument, value in factor["arguments"].items():
            yield f"{place}.{argument}", value
    yield f"{rates}.product_learning_rate.factors", listed
    yield f"{rates}.product_learning_rate.offset", arguments["offset"]


def _data_of_mesh(config: TrainRun) -> _Items:
    data = config.plan.train_data
    if isinstance(data, SeqioDataConfig):
        words = "plan.train_data.trim_output_features = False"
        yield from _unless(data.trim_output_features, words)
        words = f"plan.train_data.converter = {data.converter}"
        yield from _unless(data.converter == "encoder_decoder", words)
        data = TrainDataConfig(**shared_values(data, TrainDataConfig))
    if data is not None:
        yield from _fields(data, "plan.train_data.", "mtf")


def _data_of_t5x(config: TrainRun) -> _Items:
    data = config.plan.train_data
    if isinstance(data, TrainDataConfig):
        words = f"plan.train_data.skip_seen_data = {data.skip_seen_data}"
        yield from _unless(data.skip_seen_data is None, words)
        words = f"plan.train_data.seen_data_init_step = {data.seen_data_init_step}"
        yield from _unless(not data.seen_data_init_step, words)
        data = to_seqio_config(data, config)
    if data is None:
        yield "TASK_FEATURE_LENGTHS", config.sequence_length
        yield "BATCH_SIZE", config.batch_size
        return
    yield from _fields(data, "plan.train_data.", "t5x", always=_DATA, scope="train/")
    if config.vocabulary is not None:
        yield "seqio.SentencePieceVocabulary.sentencepiece_model_file", config.vocabulary
        # Without the number of sentinels, the same file would define another vocabulary.
        yield "seqio.SentencePieceVocabulary.extra_ids", config.vocabulary_extra_ids


# Bound even at their defaults, because the included files bind them.
_DATA, _RESTORED = ("use_cached", "pack"), ("mode", "dtype", "strict", "fallback_to_scratch")
_LOGITS = ("float32_attention_logits",)


def _run_of_mesh(config: TrainRun) -> _Items:
    yield from _data_of_mesh(config)
    yield from _fields(config.dtypes, "dtypes.", "mtf")
    yield "utils.run.sequence_length", config.sequence_length
    yield "utils.run.batch_size", ("sequences_per_batch", config.batch_size)
    rows = config.batch_size // config.num_microbatches
    # Mesh TensorFlow measures a microbatch by its longer feature.
    tokens = rows * max((config.sequence_length or {"": 1}).values())
    name = "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica"
    # Write None explicitly: t5's own files set 2,048 tokens, which may split the batch.
    yield name, tokens if config.num_microbatches > 1 else None
    layout = config.layout
    # [] is one device; defaults.gin would ask for a TPU's topology.
    parts = {"batch": layout.data or 1, "model": layout.model}
    yield "utils.run.mesh_shape", ",".join(f"{k}:{v}" for k, v in parts.items() if v > 1) or []
    if layout.fully_sharded:
        yield "layout.fully_sharded = True", _NOT_EXPRESSED
    yield "utils.run.train_steps", config.train_steps
    save, restore = config.plan.save, config.plan.restore
    # Every training run of Mesh TensorFlow saves: one without a period saves at its end.
    yield "utils.run.save_checkpoints_steps", (save and save.period) or max(1, config.train_steps)
    yield "utils.run.keep_checkpoint_max", save and save.keep
    if restore is None:
        yield "utils.run.init_checkpoint", None
    else:
        elsewhere = ("mode", "strict", *["variable_filter"] * (not restore.variable_filter))
        yield from _fields(restore, "plan.restore.", "mtf", dict.fromkeys(elsewhere, ()))
    if config.weight_metrics_every:
        yield "t0repro.jax_training.weight_metrics_every", config.weight_metrics_every
    for field in ("train_eval_data", "infer_eval_data", "relative_steps", "actions"):
        if getattr(config.plan, field):
            words = f"plan.{field}: training itself evaluates nothing and stops for nothing"
            yield words, _NOT_EXPRESSED
    if save is not None:
        elsewhere = ("period", "keep", "dtype", "data", "from_first_step")
        yield from _fields(save, "plan.save.", "mtf", dict.fromkeys(elsewhere, ()))


def _run_of_t5x(config: TrainRun) -> _Items:
    yield "MODEL_DIR", config.model_dir
    yield from _data_of_t5x(config)
    yield "TRAIN_STEPS", config.train_steps
    yield "trainer.Trainer.num_microbatches", config.num_microbatches
    if config.weight_metrics_every:
        yield "trainer.WeightMetricsComputer.every", config.weight_metrics_every
    else:
        yield "trainer.Trainer.weight_metrics_computer", None
    yield "partitioning.PjitPartitioner.num_partitions", config.layout.model
    if config.layout.fully_sharded:
        yield "partitioning.standard_logical_axis_rules.parameter_partitioning_dims", 2
    yield from _plan_of_t5x(config.plan, config.dtypes.master)


def _plan_of_t5x(plan: TrainingPlan, saved_dtype: str) -> _Items:
    # Parts of a run that are bound elsewhere, and how the dialects differ.
    elsewhere = "train_data evaluator user_classes decoding log keys may_start_past_end"
    rules: dict[str, Any] = dict.fromkeys(elsewhere.split(), ())
    # The same seed would initialize other parameters.
    if plan.keys != "split":
        rules["random_seed"] = ()
    # A line per step has no period; TRAIN_STEPS sets the run's length.
    if plan.log != "summaries":
        periods = "relative_steps eval_steps eval_period stats_period gc_period"
        rules |= dict.fromkeys([*periods.split(), "run_eval_before_training"], ())
    if (data := plan.train_eval_data) is not None:
        place = "plan.train_eval_data."
        rules["train_eval_data"] = _fields(
            data, place, "t5x", always=_DATA, scope="train_eval/", with_macros=False
        )
    if (save := plan.save) is not None:
        steps = [("utils.SaveCheckpointConfig.checkpoint_steps", list(save.steps) or None)]
        dtype = [("utils.SaveCheckpointConfig.dtype", saved_dtype)]
        save_rules = {"steps": steps, "dtype": dtype, "best": (), "from_first_step": ()}
        rules["save"] = _fields(save, "plan.save.", "t5x", save_rules, always=("keep", "data"))
    rules["restore"] = _restore_of_t5x(plan.restore)
    by_hand = plan.infer_eval_data or plan.actions or (save is not None and save.best)
    words = "infer_eval, actions and the best checkpoints: take them over by hand"
    rules |= {"infer_eval_data": _unless(not by_hand, words), "actions": ()}
    yield from _fields(plan, "plan.", "t5x", rules)


def _restore_of_t5x(restore: RestoreConfig | None) -> _Items:
    name = "utils.RestoreCheckpointConfig"
    if restore is None:
        yield f"{name}.path", []
    elif restore.variable_filter is not None:  # Mesh TensorFlow's rule in place of T5X's
        yield f"{name}.path", restore.path
        if restore.adapter:
            yield f"{name}.adapter", restore.adapter
        words = f"init_variable_filter = {restore.variable_filter!r}"
        yield from _unless(not restore.variable_filter, words)
    else:
        pairs = [tuple(pair) for pair in restore.assignment_map]
        rules = {"assignment_map": [(f"{name}.assignment_map", pairs or None)]}
        yield from _fields(restore, "plan.restore.", "t5x", rules, always=_RESTORED)
