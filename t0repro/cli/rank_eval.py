"""`t0repro rank-eval`: evaluates a mixture with one checkpoint and writes a report."""

from __future__ import annotations

import os
from typing import Annotated

from t0repro.cli.commands import More
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import ProcessOptions, ReportHead, modules_or_t0
from t0repro.cli.rank_eval_options import (
    ComputationOptions,
    EvaluationOptions,
    ResultOptions,
    TaskOptions,
)
from t0repro.cli.results import echo
from t0repro.tasks.modules import load_tasks, needs_seqio
from t0repro.tasks.registry import find_named_tasks


@expand_groups
def rank_eval(
    evaluation: EvaluationOptions,
    tasks: TaskOptions,
    results: ResultOptions,
    computation: ComputationOptions,
    head: Annotated[ReportHead, More("The report")],
    processes: ProcessOptions,
) -> None:
    r"""Score every answer choice of a mixture, rank them, and write a report.

    If it is interrupted, starting it again continues where it stopped. T0's definition of a score
    always comes first: the sum of the log-likelihoods of a choice's tokens, EOS included.

    Example:
      t0repro rank-eval --checkpoint runs/demo/model \
        --mixture demo_eval_score_eval --module_import t0repro.tasks.demo \
        --out runs/demo/rank_eval
    """
    echo("importing JAX and the tasks ...", err=True)
    # Tasks read the variable when they read their rows.
    if tasks.data is not None:
        os.environ["T0REPRO_DATA_DIR"] = str(tasks.data)
    # A wrong name is reported before JAX is imported, except of modules that import SeqIO.
    modules = modules_or_t0(tasks.module_import)
    if not needs_seqio(modules):
        load_tasks(modules, into_seqio=False)
        find_named_tasks(evaluation.mixture, "--mixture")
    with processes.joined():
        from t0repro.cli.bodies import rank_eval as body

        body.run(evaluation, tasks, results, computation, head)
