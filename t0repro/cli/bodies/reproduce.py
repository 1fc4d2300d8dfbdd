"""`t0repro reproduce`, once its options are parsed: plan, question, downloads, evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import typer

from t0repro.cli.bodies import rank_eval
from t0repro.cli.options import DEFAULT_MODULE, DType, ReportHead
from t0repro.cli.rank_eval_options import (
    ComputationOptions,
    EvaluationOptions,
    ResultOptions,
    TaskOptions,
)
from t0repro.cli.results import echo, print_columns, print_written
from t0repro.converters import released
from t0repro.errors import UserError
from t0repro.evaluation.opened import check_checkpoint, open_adapter_at
from t0repro.evaluation.selection import check_fits
from t0repro.parameters.shape import ModelShape
from t0repro.partitioning.topologies import chip_of, find_chip
from t0repro.progress import working
from t0repro.reports.prompts import load_prompts
from t0repro.reports.report import load_report
from t0repro.reports.sharing import share_report
from t0repro.runs.reproduction import (
    ASSUMED_UTILIZATION,
    MIXTURE,
    SPLIT,
    Plan,
    find_rows,
    make_plan,
    peak_memory,
)
from t0repro.storage import lock_folder, write_atomically
from t0repro.tasks.catalog import catalog
from t0repro.tasks.readers import HUB_VARIABLE, find_reader
from t0repro.tasks.user_files import DATA_VARIABLE
from t0repro.tasks.vocabulary import BYTES, VOCABULARY_VARIABLE, default_vocabulary
from t0repro.words import sized

PLAN = "plan.json"
"""In the output folder: what was asked for, and the plan that was agreed to."""
# What a model was trained on, by family; and of two that were trained on a part of it.
_TRAINED_ON = {"T0": "t0_train", "T0+": "t0+_train", "T0++": "t0++_train"}
_TRAINED_ON_PART = {
    "bigscience/T0_single_prompt": "t0_train_one_og_prompt",
    "bigscience/T0_original_task_only": "t0_train_all_og_prompts",
}
# By whose they are, in families.csv; T5's is the tasks' own, and hub repositories hold a copy.
_VOCABULARIES = {
    "bytes": BYTES,
    "mT5's": "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model",
    "umT5's": "gs://t5-data/vocabs/umt5.256000/sentencepiece.model",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is evaluated: a released checkpoint or one's own, with adapters, on a sample or all."""

    name: str | None
    checkpoint: str | None
    adapter: tuple[str, ...]
    limit: int | None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.checkpoint is None):
            raise UserError(
                "Name one checkpoint: a released one, or your own.",
                where="--checkpoint" if self.name else "NAME",
                fix="t0repro reproduce bigscience/T0_3B --out DIR, or --checkpoint PATH --out DIR.",
            )

    @property
    def label(self) -> str:
        """The model's name in the report."""
        return self.name or Path(self.checkpoint or "").name


def run(asked: Asked, out: Path, *, devices: str | None, yes: bool, dry_run: bool) -> None:
    """Plans, asks, downloads and evaluates; continues what was agreed to before.

    Raises:
      UserError: If a check fails, or the folder holds another reproduction.
    """
    if asked.name not in (None, *released.catalog()) and os.path.exists(asked.name):
        raise UserError(
            f"{asked.name} is not the name of a released checkpoint but a path.",
            where="NAME",
            fix=f"Name it with --checkpoint {asked.name}.",
        )
    own = asked.checkpoint
    near = [own] if own in released.catalog() else released.names_like(own or "")
    # A path or an address may end in such a name.
    if own is not None and near and not os.path.exists(own) and (own == near[0] or "/" not in own):
        raise UserError(
            f"{own} is not a path but the name of a released checkpoint.",
            where="--checkpoint",
            fix=f"Leave the option out: t0repro reproduce {near[0]} --out {out}.",
        )
    found = None if asked.name is None else released.find(asked.name)
    adapters = rank_eval.paths_by_label(asked.adapter)
    weights = out / "checkpoint"
    # Planning writes nothing if it is all that is asked for.
    with contextlib.nullcontext() if dry_run else lock_folder(out, "planning an evaluation"):
        _name_vocabulary(found, weights)
        load_prompts([DEFAULT_MODULE])
        activation: DType = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        agreed = None if dry_run else _read_agreed_plan(asked, out)
        if agreed is None:
            plan = _plan(asked, [*adapters.values()], found, weights, activation)
            _print_plan(plan, found, out, devices)
            if dry_run:
                return
            _ask(yes)
            record = {"asked": dataclasses.asdict(asked), "plan": dataclasses.asdict(plan)}
            write_atomically(out / PLAN, json.dumps(record, indent=1) + "\n")
            agreed = json.loads((out / PLAN).read_text(encoding="utf-8"))
    # What the question was about.
    os.environ[HUB_VARIABLE] = os.environ[released.OPT_IN] = "1"
    _fetch_rows(agreed["plan"]["rows"])
    checkpoint = asked.checkpoint or str(released.fetch(released.find(asked.label), weights).path)
    rank_eval.run(
        EvaluationOptions(checkpoint, MIXTURE, out, adapter=list(asked.adapter) or None),
        TaskOptions([DEFAULT_MODULE], SPLIT, skip_missing=True, limit=asked.limit),
        ResultOptions(also_format="lm-eval"),
        ComputationOptions(activation=activation),
        _head(asked, found),
    )
    if asked.adapter:
        return
    report = load_report(out)
    if found is not None and found.format == "hf":
        print_written(share_report(report, found.name, out / "share"), as_json=False)
    _print_measured(agreed["plan"], report.provenance.duration_seconds)


def _name_vocabulary(found: released.Released | None, weights: Path) -> None:
    """Lets the tasks read the model's own vocabulary, which may still have to be downloaded."""
    if found is None or os.environ.get(VOCABULARY_VARIABLE):
        return
    whose = released.families()[found.family].vocabulary
    if whose in _VOCABULARIES:
        os.environ[VOCABULARY_VARIABLE] = _VOCABULARIES[whose]
    elif whose == "Llama's":
        raise UserError(
            f"{found.name} has {whose} vocabulary, which T0's tasks cannot be encoded with.",
            fix=f"Name another checkpoint, or a SentencePiece model: {VOCABULARY_VARIABLE}=PATH.",
        )
    elif found.format == "hf":
        os.environ[VOCABULARY_VARIABLE] = str(weights / "spiece.model")


def _read_agreed_plan(asked: Asked, out: Path) -> dict[str, Any] | None:
    """The plan that an interrupted run of the same command had agreed to."""
    path = out / PLAN
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        name = record["asked"]["name"] or record["asked"]["checkpoint"]
        limit = record["asked"]["limit"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            "The file is not a plan of t0repro reproduce.",
            where=str(path),
            fix="Choose another --out.",
        ) from error
    if record["asked"] != json.loads(json.dumps(dataclasses.asdict(asked))):
        raise UserError(
            f"The folder holds a reproduction of something else: {name}, limit {limit}.",
            where=str(path),
            fix="Choose another --out.",
        )
    echo("Continuing what was agreed to before.")
    return record


def _plan(
    asked: Asked,
    adapters: Sequence[str],
    found: released.Released | None,
    weights: Path,
    activation: DType,
) -> Plan:
    if found is not None:
        shape: ModelShape = found.shape
        for own in map(open_adapter_at, adapters):
            own.check_shape(own.note.adapter, shape)  # before the checkpoint is downloaded
        to_fetch = released.bytes_to_fetch(found, weights)
    else:
        opened = check_checkpoint(str(asked.checkpoint), None, 1, adapters)
        check_fits(
            default_vocabulary(), opened.model.config.vocab_size, opened.path, opened.folders
        )  # before the minute of measuring
        to_fetch, shape = 0, opened.model.config.shape
    rows = find_rows(Path(os.environ.get(DATA_VARIABLE) or f"${DATA_VARIABLE}"))
    with working("measuring this machine for a minute"):
        return make_plan(shape, rows, to_fetch, asked.limit, activation)


def _print_plan(
    plan: Plan, found: released.Released | None, out: Path, devices: str | None
) -> None:
    if found is not None:
        family = released.families()[found.family]
        echo(f"{found.name}: {family.name}, {family.vocabulary} vocabulary. {family.to_know}")
    rows = [("rows", "split", "prompts", "inputs", "to download")]
    for each in plan.rows:
        size = "by hand" if each.to_fetch is None else sized(each.to_fetch) if each.to_fetch else ""
        rows.append((each.dataset, each.split, str(each.prompts), f"{each.inputs:,}", size))
    print_columns(rows)
    for each in plan.rows:
        if each.to_fetch is None:
            echo(f"Without {each.dataset}, which may not be redistributed. {each.how}")
    machine = released.this_machine(out)
    arrives = plan.weights + sum(each.to_fetch or 0 for each in plan.rows)
    memory = machine.memory
    # Every device holds the whole model.
    if machine.accelerators and jax.default_backend() != "cpu":
        memory = min(size for _, size in machine.accelerators)
    for what, needed, has in (
        ("to download", arrives, machine.disk), ("memory", plan.memory, memory),
    ):  # fmt: skip
        fits = "fits" if needed <= has else "DOES NOT FIT"
        echo(f"{what}: {sized(needed)}; {sized(has)} here: {fits}.")
    # It was measured on one, whatever there is.
    one = f"one {jax.devices()[0].device_kind}"
    echo(f"{plan.tokens.pairs:,.0f} pairs to score: about {_hours(plan.seconds)} on {one}.")
    if devices is not None:
        number, chip = _chips(devices)
        seconds = plan.seconds * plan.speed.flops / (number * chip.flops * ASSUMED_UTILIZATION)
        echo(
            f"On {devices}, at {ASSUMED_UTILIZATION:.0%} of its published speed (assumed, not"
            f" measured): about {_hours(seconds)}, compilation left out;"
            f" {sized(number * chip.memory)} of memory."
        )


def _chips(devices: str) -> tuple[int, Any]:
    """Number and figures of devices: `8xNVIDIA H100`, or a TPU slice such as `v5e-8`."""
    number, _, kind = devices.rpartition("x")
    chip = find_chip(kind)
    if chip is not None and (not number or number.isdecimal()):
        return int(number or 1), chip
    size = devices.rpartition("-")[2]
    return int(size) if size.isdecimal() else 1, chip_of(devices)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _ask(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(
            "Nobody can be asked whether to go on: standard input is no terminal.",
            fix="Add --yes, or --dry_run for the plan alone.",
        )
    typer.confirm("Download what is missing, and evaluate?", abort=True)


def _fetch_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Downloads the rows that are missing; fails where the evaluation would leave tasks out."""
    entries = {entry.label: entry for entry in catalog().values()}
    for each in rows:
        if each["to_fetch"] is not None:
            entry = entries[each["dataset"]]
            find_reader(None, entry.dataset, entry.subset, each["split"])


def _head(asked: Asked, found: released.Released | None) -> ReportHead:
    trained = None
    if found is not None:
        trained = _TRAINED_ON_PART.get(found.name) or _TRAINED_ON.get(found.family)
    return ReportHead(
        label=asked.label,
        title=f"T0's zero-shot evaluation of {asked.label}",
        train_mixture=[trained] if trained else None,
    )


def _print_measured(plan: Mapping[str, Any], seconds: float | None) -> None:
    """Prints what the evaluation took next to what was planned."""
    if seconds:
        echo(f"scoring: planned {_hours(plan['seconds'])}, took {_hours(seconds)}.")
    echo(f"memory: planned {sized(plan['memory'])}, took {sized(peak_memory())}.")
