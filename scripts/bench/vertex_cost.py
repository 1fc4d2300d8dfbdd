"""Estimates the time of a T0 evaluation on Vertex AI's machines, and its cost at given prices.

    python scripts/bench/vertex_cost.py --pairs 1000000
    python scripts/bench/vertex_cost.py --pairs 1000000 --prices prices.yaml --utilization 0.4

The evaluation is T0's score_eval: 262,144 input tokens a batch, so 256 pairs, each encoded and
decoded. Its steps are compiled for each slice with one and with two layers per tower; every further
layer adds as much as the second. The step time is precompile's lower bound, from published peaks
without overlap; --utilization is the share of the peak that your runs reach.

    hours = pairs / 256 x (encode + decode) / utilization / 3600
    cost  = hours x the machine's price per hour

The file of prices has an entry for each machine, from Google's page on the day that you write it:

    as_of: 2026-11-22
    currency: USD
    per_hour: {TPU_V3-8: ..., TPU_V3-32: ...}

Needs libtpu (the extra tpu) and no TPU.
"""

from __future__ import annotations

import argparse

import precompile_t0  # beside this script; it keeps JAX to the CPU

ROWS, LAYERS = 256, 24


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, required=True, help="(input, choice) pairs to score")
    parser.add_argument("--slices", nargs="+", default=["v2-8", "v3-8", "v3-32"])
    parser.add_argument("--utilization", type=float, default=1.0)
    parser.add_argument("--prices", help="a YAML file, as above")
    options = parser.parse_args()
    prices = read_prices(options.prices)

    print("machine      encode, s  decode, s      hours  cost")
    for name in options.slices:
        one, two = step_seconds(name, 1), step_seconds(name, 2)
        encode, decode = (a + (LAYERS - 1) * (b - a) for a, b in zip(one, two, strict=True))
        hours = options.pairs / ROWS * (encode + decode) / options.utilization / 3600
        machine = f"TPU_{name.upper()}"
        price = prices["per_hour"].get(machine)
        cost = f"{hours * price:.2f} {prices['currency']}" if price else "needs its price"
        print(f"{machine:<12} {encode:>9.3g}  {decode:>9.3g}  {hours:>9.3g}  {cost}", flush=True)
    if options.prices:
        print(f"prices as of {prices['as_of']}")


def step_seconds(topology: str, layers: int) -> tuple[float, float]:
    """Predicted seconds to encode and to decode a batch, for a number of layers per tower."""
    from t0repro.partitioning.topologies import devices_of
    from t0repro.runs.precompile import predict_seconds
    from t0repro.runs.programs import arrange_run, compile_programs

    on_slice = f"utils.tpu_mesh_shape.tpu_topology = '{topology}'"
    config = precompile_t0.configured("xl", "evaluate", layers, [on_slice])
    devices, chip = devices_of(topology)
    config, partitioning, _ = arrange_run(config, devices)
    seconds = {}
    for program in compile_programs(config, partitioning):
        if program.refused:
            raise SystemExit(f"{topology}, {program.name}: {program.refused}")
        seconds[program.name] = predict_seconds(program, partitioning, chip)
        if len(seconds) == 2:  # the third program, generation, is not part of scoring
            break
    return seconds["encode"], seconds["decode"]


def read_prices(path: str | None) -> dict:
    """The price file; this script contains no prices."""
    if path is None:
        return {"per_hour": {}}
    from t0repro import yaml_files

    try:
        with open(path, encoding="utf-8") as file:
            return yaml_files.load(file.read())
    except OSError as error:
        raise SystemExit(f"--prices {path}: {error.strerror}; its form is in --help") from error


if __name__ == "__main__":
    from t0repro.errors import UserError

    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from error
