"""Costs of a traced or compiled program: FLOPs, bytes saved for the backward pass, bytes sent."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Var

# ---- FLOPs, counted on matmuls -------------------------------------------------------------------


ATTENDED = "attended"
"""The name of an attention kernel's results, by which rematerialization can save them."""

KERNEL_MATMULS = {"t0repro_attention": 2, "t0repro_attention_gradients": 4}
"""How many matmuls over queries x keys x depth each attention kernel represents."""


def count_flops(jaxpr: Any) -> int:
    """FLOPs of all matmuls in a jaxpr, two for each multiply-add.

    Loops of known length count as often as they run, a loop until a condition once. Matmuls
    rematerialized in the backward pass count again, except inside an attention kernel, which counts
    like whole-matrix attention. Everything else is left out; in a T5 that is a few percent.

    Args:
      jaxpr: of the whole computation, on all devices together.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        elif matmuls := KERNEL_MATMULS.get(equation.params.get("target_name")):
            total += matmuls * _kernel(equation)
        elif equation.primitive.name == "pallas_call":
            # Its jaxpr has one block's matmuls.
            total += equation.params["cost_estimate"].flops
        else:
            inner = sum(count_flops(inner) for inner in _inner(equation.params))
            total += _times(equation) * inner
    return total


def _times(equation: Any) -> int:
    """How often the jaxpr of an equation runs, on all devices together."""
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name == "shard_map":
        # Its jaxpr is what a single device computes.
        mesh = equation.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
    return 1


def _dot(equation: Any) -> int:
    """Twice the size of the result, times the size of the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    )


def _kernel(equation: Any) -> int:
    """FLOPs of one matmul of an attention kernel, whose first arguments are queries and keys."""
    (batch, heads, length, depth), keys = (x.aval.shape for x in equation.invars[:2])
    return 2 * batch * heads * length * keys[2] * depth


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls; for a condition, those of all branches."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            # Some primitives hold a jaxpr, others a closed one around it.
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


# ---- Bytes that a backward pass keeps of its forward pass, counted by tracing; nothing is
# compiled


# Other views of the same values, for which a compiler allocates no array.
_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def residual_bytes(loss: Callable[[Any, Any], Any], parameters: Any, inputs: Any) -> int:
    """Bytes of a loss's residuals that depend on `inputs`, which change at each step.

    Residuals that depend only on the parameters do not count, because the program holds parameters
    anyway; nor do those offloaded to host memory.

    Args:
      loss: Maps parameters and `inputs` to a scalar loss and auxiliary values.
      parameters: Their shapes; the loss is differentiated by them.
      inputs: Shapes of the inputs that change at each step: the batch and the dropout key.
    """

    def residuals(inputs: Any, parameters: Any) -> list[jax.Array]:
        backward = jax.vjp(lambda p: loss(p, inputs), parameters, has_aux=True)[1]
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(inputs, parameters).jaxpr
    count = len(jax.tree.leaves(inputs))
    dependent = _dependent(jaxpr, [index < count for index in range(len(jaxpr.invars))])
    made_by = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def viewed(variable: Any) -> Any:
        """The array behind a view, so that two views of it count once."""
        while variable in made_by and made_by[variable].primitive.name in _VIEWS:
            variable = made_by[variable].invars[0]
        return variable

    kept = {viewed(x) for x in jaxpr.outvars if isinstance(x, Var) and x in dependent}
    # The batch itself is an argument of the program.
    arrays = [x.aval for x in kept.difference(jaxpr.invars) if not _on_host(x.aval)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def bytes_per_device(tree: Any) -> int:
    """Bytes of a device's shards of all arrays of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _on_host(array: Any) -> bool:
    """Whether an array is offloaded to host memory (`recompute = 'offload'`)."""
    return array.memory_space == jax.memory.Space.Host


def _dependent(jaxpr: Any, given: Sequence[bool]) -> set[Var]:
    """The variables of a jaxpr that depend on the given inputs."""
    found = {variable for variable, known in zip(jaxpr.invars, given, strict=True) if known}
    for equation in jaxpr.eqns:
        inputs = [isinstance(x, Var) and x in found for x in equation.invars]
        outputs = _outputs(equation, inputs)
        found.update(x for x, known in zip(equation.outvars, outputs, strict=True) if known)
    return found


def _outputs(equation: Any, inputs: list[bool]) -> list[bool]:
    """Which outputs of an equation depend on its marked inputs.

    Looks into loops and calls, because a scan over layers returns kernels as well as activations.
    """
    inner = [
        getattr(value, "jaxpr", value)
        for value in equation.params.values()
        if hasattr(getattr(value, "jaxpr", value), "eqns")
    ]
    if not any(inputs) or len(inner) != 1 or len(inner[0].invars) != len(inputs):
        return [any(inputs)] * len(equation.outvars)
    (body,) = inner
    outputs = _results(body, inputs)
    if equation.primitive.name == "scan":
        start = equation.params["num_consts"]
        # Carried values may make more of the next iteration depend on the batch.
        stop = start + equation.params["num_carry"]
        while any(new := [b and not a for a, b in zip(inputs[start:stop], outputs, strict=False)]):
            merged = [a or b for a, b in zip(inputs[start:stop], new, strict=True)]
            inputs = [*inputs[:start], *merged, *inputs[stop:]]
            outputs = _results(body, inputs)
    return outputs


def _results(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    dependent = _dependent(jaxpr, given)
    return [isinstance(x, Var) and x in dependent for x in jaxpr.outvars]


# ---- The communication of a compiled program, read off its HLO text ------------------------------


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "s4": 4, "u4": 4}
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|called_computations|branch_computations)="
    r"(?:\{(?P<many>[^}]*)\}|%?(?P<one>[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]\s*\{(?P<taken>[^}]*)\}")
_LENGTH = re.compile(r"'(\w+)'=(\d+)")
_TAKEN = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred|s4|u4|f8\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which devices exchange data.

    Attributes:
      kind: its name in HLO, one of `KINDS`.
      result: bytes of its result on each device.
      group: number of devices that take part together.
      in_loop: whether it is in the body of a loop, such as a scan.
      times: how often it runs in one call of the program; a loop of unknown length counts once.
    """

    kind: str
    result: int
    group: int
    in_loop: bool
    times: int

    @property
    def sent(self) -> int:
        """Bytes that a device sends per call of the program, in a ring over its group."""
        others = (self.group - 1) / self.group
        # A reduce-scatter returns one shard of the reduced array; the other kinds return all of it.
        factor = {
            "all-reduce": 2 * others,
            "all-gather": others,
            "reduce-scatter": self.group - 1,
            "all-to-all": others,
        }.get(self.kind, 1.0)
        return math.ceil(self.result * factor * self.times)


def collectives(hlo: str) -> list[Collective]:
    """Every collective operation of a compiled program.

    Args:
      hlo: the result of `as_text` of a compiled function.
    """
    lines = _computations(hlo)
    calls = {name: list(_calls(body, lines)) for name, body in lines.items()}
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", hlo, re.M)
    if entry is None:
        return []
    runs: dict[str, tuple[int, bool]] = {}

    # A computation may be called from several places, inside and outside of a loop.
    def visit(name: str, times: int, in_loop: bool) -> None:
        before = runs.get(name, (0, False))
        runs[name] = (before[0] + times, before[1] or in_loop)
        for called, trips, loop in calls.get(name, ()):
            visit(called, times * trips, in_loop or loop)

    visit(entry[1], 1, False)
    return [
        Collective(kind, size, group, in_loop, times)
        for name, (times, in_loop) in runs.items()
        for kind, size, group in _operations(name, lines.get(name, []))
    ]


def counts(found: list[Collective]) -> dict[str, int]:
    """Number of operations of each kind, separately for loops: {"all-reduce in loop": 24, ...}."""
    names = [f"{item.kind} in loop" if item.in_loop else item.kind for item in found]
    return dict(sorted(collections.Counter(names).items()))


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    lines: dict[str, list[str]] = {}
    body: list[str] = []
    for line in hlo.splitlines():
        # A computation's first line is not indented; its operations are.
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            body = lines[head["name"]] = []
        else:
            body.append(line)
    return lines


def _calls(body: list[str], lines: dict[str, list[str]]) -> Iterator[tuple[str, int, bool]]:
    """The computations that one calls: name, number of calls, and whether as a loop's body."""
    for line in body:
        loop = " while(" in line
        times = _trip_count(line, lines) if loop else 1
        for match in _CALLED.finditer(line):
            for name in (match["many"] or match["one"]).split(","):
                yield name.strip().lstrip("%"), times, loop


def _trip_count(line: str, lines: dict[str, list[str]]) -> int:
    """How often a loop runs: from XLA's annotation or, on TPUs, the bound of its counter."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = lines.get(condition[1], []) if condition else []
    if not any("direction=LT" in each for each in body):
        return 1
    limits = [int(found[1]) for each in body if (found := _CONSTANT.search(each))]
    return limits[0] if len(limits) == 1 else 1


def _operations(name: str, body: list[str]) -> Iterator[tuple[str, int, int]]:
    """The collectives of a computation of this name: kind, bytes of the result, size of a group."""
    # A TPU's reduce-scatter is a fusion with this name: an all-reduce and a slice of its result.
    scatters = name.startswith("all-reduce-scatter")
    for line in body:
        if match := _OPERATION.search(line):
            # A result may be a tuple: XLA combines several arrays in one operation.
            sizes = [_bytes(*array) for array in _ARRAY.findall(match["type"])]
            if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
                sizes = sizes[len(sizes) // 2 :]  # the first half are its operands
            kind, size, group = match["kind"], sum(sizes), _group(line)
            if scatters and kind == "all-reduce":
                kind, size = "reduce-scatter", size // group
            yield kind, size, group


def _bytes(dtype: str, shape: str) -> int:
    # A type's name ends in its number of bits, except for pred, which takes a byte.
    bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def _group(line: str) -> int:
    """Size of a group: 2 in `replica_groups={{0,1},{2,3}}` and in `replica_groups=[4,2]<=[8]`.

    libtpu also names axes of a mesh: 8 in `replica_groups=mesh['a'=8,'b'=4] {'a'}`, and 2 if it
    uses only part of that axis, `{'a':(1)2}`.
    """
    if match := _MESH_GROUPS.search(line):
        lengths = {name: int(length) for name, length in _LENGTH.findall(match["mesh"])}
        taken = _TAKEN.findall(match["taken"])
        return math.prod(int(part) if part else lengths[name] for name, part in taken)
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return match[1].count(",") + 1
    return 2  # a permutation has pairs, no groups
