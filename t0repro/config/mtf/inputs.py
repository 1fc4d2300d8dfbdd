"""The rules by which gin's bindings make what either backend checks first: data and batches.

A shape of a mesh is written `batch:16,model:8`, layout rules `batch:batch,d_ff:model`: a rule names
the mesh dimension that shards a tensor's dimension. Either is taken as gin binds it: as text, as
pairs, or as Mesh TensorFlow's own objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.configuration import RunInputs
from t0repro.config.gin import door
from t0repro.config.mtf.arguments import Arguments, full_name
from t0repro.config.mtf.stand_ins import Dimension
from t0repro.config.run import Run
from t0repro.config.settings import check_field, freeze
from t0repro.errors import UserError

_BATCH_METHODS = (
    "tokens_per_batch", "sequences_per_batch", "tokens_per_replica", "sequences_per_replica",
)  # fmt: skip
_BIND_LENGTHS = "Bind run.sequence_length = {'inputs': N, 'targets': N}."
# Names of TensorFlow's types, which it also takes in other spellings.
_DTYPES = {"half": "float16", "double": "float64"}
_KNOWN_DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_inputs(arguments: Arguments, model_dir: str) -> RunInputs:
    """The values that either backend checks before the run.

    Raises:
      UserError: For values that `run` would refuse too.
    """
    _check_run(arguments)
    _check_mesh(arguments)
    sequence_length = _read_lengths(arguments)
    batch_size = _read_batch_size(arguments, sequence_length)
    num_microbatches = _count_microbatches(arguments, batch_size, sequence_length)
    master_dtype, tpu_mesh = read_dtype_name(arguments, "master_dtype"), derive_tpu_mesh(arguments)
    name, use_cached = _find_data(arguments)
    return arguments.settings(
        RunInputs,
        "",
        model_dir=model_dir,
        batch_size=batch_size,
        sequence_length=sequence_length,
        eval_checkpoint_step=freeze(arguments.run["eval_checkpoint_step"]),
        mixture_or_task_name=name,
        use_cached=use_cached,
        master_dtype=master_dtype,
        num_microbatches=num_microbatches,
        tpu_mesh=tpu_mesh,
        provenance=arguments.provenance,
    )


def _check_run(arguments: Arguments) -> None:
    """Refuses arguments that `run` would refuse too."""
    run, mode = arguments.run, arguments.run["mode"]
    if mode == "train" and run["dataset_split"] != "train":
        raise UserError(
            f"run.mode is 'train', and run.dataset_split is {run['dataset_split']!r}.",
            where=arguments.place("dataset_split"),
            fix="Training reads the split 'train'; remove the binding.",
        )
    estimator = "utils.tpu_estimator_model_fn"
    start = arguments.read(estimator).get("init_checkpoint")
    # Today's Mesh TensorFlow gets it from `run`, and silently starts from random parameters if
    # there is none.
    if mode == "train" and start is not None and start != run["init_checkpoint"]:
        raise UserError(
            f"tpu_estimator_model_fn.init_checkpoint is {start!r}, which Mesh TensorFlow no"
            f" longer reads: it takes run.init_checkpoint, which is {run['init_checkpoint']!r}.",
            where=arguments.place("init_checkpoint", estimator),
            fix=f"Bind run.init_checkpoint = {start!r}; or, not to start from it,"
            " tpu_estimator_model_fn.init_checkpoint = None.",
        )
    # In these two modes None stands for the longest example's length.
    if run["sequence_length"] is None and mode not in ("eval", "score_eval"):
        raise UserError(
            f"run.sequence_length is None, and mode {mode!r} needs one.",
            where=arguments.place("sequence_length"),
            fix=_BIND_LENGTHS,
        )


def _check_mesh(arguments: Arguments) -> None:
    for argument, read, example in (
        ("mesh_shape", mesh_dimensions, "'batch:4,model:2'"),
        ("layout_rules", layout_pairs, "'batch:batch,d_ff:model'"),
    ):
        value = arguments.run[argument]
        try:
            read(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"run.{argument} is {value!r}: {error}.",
                where=arguments.place(argument),
                fix=f"Bind a text such as {example}, or [].",
            ) from None


def _find_data(arguments: Arguments) -> tuple[str | None, bool]:
    """The mixture that the mode reads, and whether it comes from a cache."""
    mode = arguments.run["mode"]
    if mode == "train":
        function, reader, argument = "mesh_train_dataset_fn", "utils.run", "train_dataset_fn"
    elif mode in ("eval", "score_eval", "perplexity_eval"):
        function, reader, argument = "mesh_eval_dataset_fn", "utils.run", "eval_dataset_fn"
    elif mode == "score_from_dataset":
        function, reader, argument = "mesh_eval_dataset_fn", f"utils.{mode}", "score_dataset_fn"
    else:
        # infer and score_from_strings read lines, not a mixture.
        return None, False
    reference = arguments.reference(reader, argument)
    bound = arguments.read(function, reference.scope if reference else "")
    return bound.get("mixture_or_task_name"), bound["use_cached"]


def derive_tpu_mesh(arguments: Arguments) -> str | None:
    """The device mesh for a TPU's topology, if run.mesh_shape calls for one."""
    # Read the binding as written: the value that it gives no longer shows its origin.
    bound = door.value_of(full_name("utils.run"), "mesh_shape")
    if door.selector_of(bound) != full_name("utils.tpu_mesh_shape"):
        return None
    dimensions = mesh_dimensions(arguments.run["mesh_shape"])
    return ",".join(f"{each.name}:{each.size}" for each in dimensions) or None


def _read_lengths(arguments: Arguments) -> Mapping[str, int] | None:
    length, where = arguments.run["sequence_length"], arguments.place("sequence_length")
    # Mesh TensorFlow takes one number for both features.
    if isinstance(length, int) and not isinstance(length, bool):
        length = {"inputs": length, "targets": length}
    if length is None:
        return None
    if not isinstance(length, Mapping):
        raise UserError(f"run.sequence_length is {length!r}.", where=where, fix=_BIND_LENGTHS)
    check_field(Run, "sequence_length", length, where)
    # Only the task itself lists further features.
    for feature in ("targets",) if arguments.model_type == "lm" else ("inputs", "targets"):
        if feature not in length:
            raise UserError(
                f"run.sequence_length has no length for {feature!r}, only for"
                f" {', '.join(map(repr, length)) or 'nothing'}.",
                where=where,
                fix=_BIND_LENGTHS,
            )
    return length


def _read_batch_size(arguments: Arguments, sequence_length: Mapping[str, int] | None) -> int:
    size, where = arguments.run["batch_size"], arguments.place("batch_size")
    if isinstance(size, int | float):
        check_field(Run, "batch_size", size, where)
        return int(size)
    if not isinstance(size, tuple | list) or len(size) != 2 or size[0] not in _BATCH_METHODS:
        raise UserError(
            f"run.batch_size is {size!r}.",
            where=where,
            fix=f"Bind it to a number or to (METHOD, N), with one of {list(_BATCH_METHODS)}.",
        )
    method, amount = size
    check_field(Run, "batch_size", amount, where, shown=f"batch_size ({method})")
    if method.startswith("tokens"):
        bound = f"run.batch_size = {(method, amount)!r}"
        if sequence_length is None:
            raise UserError(
                f"{bound} counts tokens, and run.sequence_length is None.",
                where=where,
                fix="Bind run.batch_size to a number or to ('sequences_per_batch', N).",
            )
        # The longest feature alone: T0's 2**20 tokens at 1,024 inputs are 1,024 sequences.
        longest = max(sequence_length.values())
        if amount % longest:
            raise UserError(
                f"{bound} is not a whole number of sequences of {longest} tokens.",
                where=where,
                fix=f"Bind a multiple of {longest}: ({method!r},"
                f" {max(1, round(amount / longest)) * longest}).",
            )
        amount //= longest
    if method.endswith("per_batch"):
        return amount
    # Mesh TensorFlow counts replicas along both of these dimensions.
    return amount * count_shards(arguments, "batch") * count_shards(arguments, "outer_batch")


def _count_microbatches(
    arguments: Arguments, batch_size: int, sequence_length: Mapping[str, int] | None
) -> int:
    name = "utils.serialize_num_microbatches"
    tokens = arguments.read(name)["tokens_per_microbatch_per_replica"]
    # Only training accumulates gradients.
    if not tokens or sequence_length is None or arguments.run["mode"] != "train":
        return 1
    shards = count_shards(arguments, "batch")
    if batch_size % shards:
        if not derive_tpu_mesh(arguments):
            raise UserError(
                f"The batch of {batch_size} sequences is not divided by {shards} shards.",
                where=arguments.place("batch_size"),
                fix=f"Bind a batch size that is a multiple of {shards}.",
            )
        shards = 1  # a batch too small for the TPU still fits one device
    rows = batch_size // shards
    # As in Mesh TensorFlow, a microbatch has at least one sequence, however long, and its size
    # divides the replica's rows.
    most = max(1, tokens // max(sequence_length.values()))
    return rows // next(size for size in range(most, 0, -1) if rows % size == 0)


def read_dtype_name(arguments: Arguments, argument: str) -> str:
    """The name of the type that get_variable_dtype is bound to, given as text or TensorFlow's own.

    Raises:
      UserError: if TensorFlow has no such type.
    """
    value: Any = arguments.read("utils.get_variable_dtype")[argument]
    name = getattr(value, "name", value)
    name = _DTYPES.get(name, name) if isinstance(name, str) else None
    if name in _KNOWN_DTYPES:
        return name
    raise UserError(
        f"get_variable_dtype.{argument} is {value!r}; TensorFlow has no such type.",
        where=arguments.place(argument, "utils.get_variable_dtype"),
        fix="Bind 'float32' or 'bfloat16'.",
    )


def mesh_dimensions(shape: Any) -> tuple[Dimension, ...]:
    """The dimensions of a mesh.

    Raises:
      ValueError: If it is not a shape.
    """
    if isinstance(shape, str):
        dimensions = tuple(Dimension(name, int(size)) for name, size in _pairs(shape))
    else:
        # Mesh TensorFlow's own Shape holds its dimensions as `dims`, with `name` and `size`.
        dimensions = tuple(_dimension(each) for each in getattr(shape, "dims", shape))
    if len({each.name for each in dimensions}) < len(dimensions):
        raise ValueError("a dimension is repeated")
    return dimensions


def _dimension(value: Any) -> Dimension:
    name, size = (value.name, value.size) if hasattr(value, "size") else value
    if not isinstance(name, str) or type(size) is not int:
        raise ValueError(f"{value!r} is not a name and a size")
    return Dimension(name, size)


def layout_pairs(rules: Any) -> frozenset[tuple[str, str]]:
    """Pairs of a tensor's dimension and the mesh's dimension that shards it.

    Raises:
      ValueError: If they are not layout rules.
    """
    pairs = _pairs(rules) if isinstance(rules, str) else getattr(rules, "_pairs", rules)
    return frozenset((tensor, mesh) for tensor, mesh in pairs)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, re.split("[,;]", text.replace(" ", ""))):
        first, _, second = part.partition(":")
        if not first or not second or ":" in second:
            raise ValueError(f"{part!r} is not a pair A:B")
        yield first, second


def count_shards(arguments: Arguments, *dimensions: str) -> int:
    """How many shards a tensor of these dimensions has.

    Raises:
      ValueError: If several dimensions of the mesh shard one of them.
    """
    pairs = layout_pairs(arguments.run["layout_rules"])
    axes: set[Dimension] = set()  # a set: dimensions on the same axis are sharded by it once
    for dimension in dimensions:
        shape = mesh_dimensions(arguments.run["mesh_shape"])
        along = [each for each in shape if (dimension, each.name) in pairs]
        if len(along) > 1:
            raise ValueError(f"{dimension} is divided along {' and '.join(x.name for x in along)}")
        axes.update(along)
    return math.prod(axis.size for axis in axes)
