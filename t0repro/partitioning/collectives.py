"""The communication of a compiled program, read off its HLO text."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

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
_AXIS_LENGTH = re.compile(r"'(\w+)'=(\d+)")
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
        lengths = {name: int(length) for name, length in _AXIS_LENGTH.findall(match["mesh"])}
        taken = _TAKEN.findall(match["taken"])
        return math.prod(int(part) if part else lengths[name] for name, part in taken)
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return match[1].count(",") + 1
    return 2  # a permutation has pairs, no groups
