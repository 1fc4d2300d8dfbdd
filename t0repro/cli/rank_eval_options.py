"""The options of `t0repro rank-eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from t0repro.cli.commands import More
from t0repro.cli.options import AsJson, DType, ModulesOrT0, SkipMissing, Trackers
from t0repro.cli.paths import output, source


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and where the results go."""

    checkpoint: Annotated[
        str,
        typer.Option(
            callback=source, help="A checkpoint in any format that t0repro convert reads."
        ),
    ]
    mixture: Annotated[str, typer.Option(help="A mixture, or a task.")]
    out: Annotated[Path, typer.Option(callback=output, help="Folder for scores and report.")]
    step: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,...|all",
            help="Step of the checkpoint; repeatable. Of several steps, or all, the report is of"
            " the last, with the accuracy by step.",
            show_default="the latest",
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL=]DIR",
            help="Evaluate the checkpoint with this adapter, ours or a folder of PEFT's;"
            " repeatable. The results of each are in OUT/LABEL, a comparison of several in OUT.",
            show_default="the checkpoint alone",
        ),
    ] = None
    modes: Annotated[
        Literal["rank", "rank,generate", "generate"],
        typer.Option(help="rank answer choices; generate decodes the tasks that have none."),
    ] = "rank"
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run", help="Only check: tasks, split, checkpoint, folder. Nothing is written."
        ),
    ] = False
    as_json: AsJson = False


@dataclasses.dataclass(frozen=True)
class ResultOptions:
    """Which results are written in addition to T0's scores, and over which they may be written."""

    HEADING: ClassVar = More("Results")

    normalize: Annotated[
        Literal["none", "target_length"],
        typer.Option(
            help="target_length also reports scores divided by the choice's number of tokens; T0's"
            " definition does not divide."
        ),
    ] = "none"
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated", help="Also report contextual calibration (Zhao et al. 2021)."),
    ] = False
    also_format: Annotated[
        Literal["lm-eval"] | None,
        typer.Option(
            "--format",
            help="Also write lm-evaluation-harness's results and samples, to OUT/lm_eval.",
        ),
    ] = None
    add_step: Annotated[
        bool,
        typer.Option(
            "--add_step",
            help="OUT may hold this evaluation of other steps, for `report history`.",
        ),
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Remove another evaluation that OUT holds.")
    ] = False
    tracker: Trackers = None


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Which rows of which tasks are evaluated."""

    HEADING: ClassVar = "Tasks and rows"

    module_import: ModulesOrT0 = None
    split: Annotated[str, typer.Option(help="The split of every task.")] = "validation"
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folders of the datasets, separated by colons.", show_default="T0REPRO_DATA_DIR"
        ),
    ] = None
    cache_dir: Annotated[
        Path | None, typer.Option(help="Read the tasks from this SeqIO cache.")
    ] = None
    skip_missing: SkipMissing = False
    # By a hash of the input's number, so that prompts over the same rows get the same inputs.
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate a random sample of this many inputs per task."),
    ] = None


@dataclasses.dataclass(frozen=True)
class ComputationOptions:
    """How scores are computed, and how long texts may be."""

    HEADING: ClassVar = More("Computation")

    tokens_per_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Input tokens under way on a device; changes no score.", show_default="auto"
        ),
    ] = None
    model_parallelism: Annotated[
        int, typer.Option(min=1, help="Devices that shard each layer; the rest shard the rows.")
    ] = 1
    activation: Annotated[
        DType | None,
        typer.Option(help="Type of activations.", show_default="float32 on CPU, else bfloat16"),
    ] = None
    # T0's own lengths.
    inputs_length: Annotated[int, typer.Option(min=1, help="Maximum tokens of an input.")] = 1024
    targets_length: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of a choice, or of decoded text.")
    ] = 256
