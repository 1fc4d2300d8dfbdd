"""Prints the tables of docs/what_fits.md: memory by model and mode.

    python -P scripts/bench/what_fits.py            # from the released shapes, at once
    python scripts/bench/what_fits.py --compiled    # as the compiler says, for TPUs: half an hour

The second compiles T0's training (1,024 packed rows of 1,024 and 256 tokens, in microbatches of 8
rows on a device) and its evaluation (8 pairs on a device), at full depth. It needs libtpu (the
extra tpu) and no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from t0repro.converters.needs import needs_of
from t0repro.converters.released import find

# One of each size; the LM-adapted T5 1.1, T0 and Flan-T5 have the shapes of T5 1.1.
TITLES = {
    "small": "T5 1.1 small",
    "base": "T5 1.1 base",
    "large": "T5 1.1 large",
    "xl": "T5 1.1 XL (T0-3B)",
    "xxl": "T5 1.1 XXL (T0, 11B)",
}
ROWS = 8  # on a device, of a microbatch or of a batch that is evaluated


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on so many chips; if several, fully sharded.

    Attributes:
      size: one of TITLES.
      chips: how many.
      slice: a TPU slice that has them.
      recompute: what training's backward pass computes again.
    """

    size: str
    chips: int
    slice: str
    recompute: str = "none"

    def __str__(self) -> str:
        sharded = ", fully sharded" if self.chips > 1 else ""
        return f"{self.chips} x {self.slice.partition('-')[0]}{sharded}"


CASES = (
    Case("small", 1, "v5e-4"),
    Case("base", 1, "v5e-4", "minimal"),
    Case("large", 1, "v5e-4", "full"),
    Case("xl", 1, "v5p-8", "full"),
    Case("xl", 8, "v5e-8", "full"),
    Case("xxl", 1, "v5p-8", "full"),
    Case("xxl", 8, "v6e-8", "full"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compiled", action="store_true", help="the table from compiled programs")
    parser.add_argument("--cases", nargs="+", type=int, help="lines of that table; all by default")
    options = parser.parse_args()
    if options.compiled:
        chosen = CASES if options.cases is None else [CASES[number] for number in options.cases]
        for line in compiled_table(chosen):
            print(line, flush=True)
    else:
        print(table())


def table() -> str:
    """The Markdown table from shapes."""
    rows = ["| model | parameters | evaluation, GB | training, GB | a checkpoint, GB |",
            "|---|---|---|---|---|"]  # fmt: skip
    for size, title in TITLES.items():
        needs = needs_of(find(f"t5.1.1.lm100k.{size}"))
        gigabytes = [needs.evaluation, needs.training, needs.training_disk]
        shown = " | ".join(f"{count / 1e9:.2f}" for count in gigabytes)
        rows.append(f"| {title} | {needs.parameters:,} | {shown} |")
    return "\n".join(rows)


def compiled_table(cases: Sequence[Case]) -> Iterator[str]:
    """The Markdown table from compiled programs, line by line: GiB of one device."""
    yield "| model | chips | GiB on each | training | recomputes | scoring | generating |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        (training, *_), available = compiled(case, "train")
        (encode, decode, generate), _ = compiled(case, "evaluate")
        cells = [
            f"{size:.2f}" + ("" if size <= available else ", too much")
            for size in (training, max(encode, decode), generate)
        ]
        yield (
            f"| {TITLES[case.size]} | {case} | {available:.2f} | {cells[0]} | {case.recompute} |"
            f" {cells[1]} | {cells[2]} |"
        )


def compiled(case: Case, command: str) -> tuple[list[float], float]:
    """GiB of a device for each program of one of T0's commands, and GiB that there are."""
    from precompile_t0 import configured  # beside this script; it keeps JAX to the CPU

    from t0repro.config.run_config import Layout
    from t0repro.partitioning.topologies import GIB, devices_of
    from t0repro.runs.precompile import compiled_for

    config = configured(case.size, command)
    rows = ROWS * case.chips
    parts = config.batch_size // rows if command == "train" else 1
    config = dataclasses.replace(
        config,
        layout=Layout(fully_sharded=case.chips > 1),
        model=dataclasses.replace(config.model, recompute=case.recompute),
        batch_size=rows * parts,
        num_microbatches=parts,
    )
    devices, chip = devices_of(case.slice)
    _, programs = compiled_for(config, devices[: case.chips])
    return [each.total / GIB for each in programs], chip.memory / GIB


if __name__ == "__main__":
    main()
