"""Runs a module of t5, Mesh TensorFlow or SeqIO as a program, with compat's patches applied.

    python -m t0repro.mtf t5.scripts.parse_tb --summary_dir=DIR --out_file=FILE

does what `python -m t5.scripts.parse_tb ...` did with the TensorFlow and pandas of t5's time.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

from t0repro import compat


def read_events_in_either_form() -> None:
    """Makes t5.scripts.parse_tb read metrics stored as tensors, as the JAX stack's are.

    `eval_utils.parse_events_files` reads such a metric as 0; TensorFlow 1's summaries have no
    tensors.
    """
    from t5.evaluation import eval_utils

    from t0repro.event_files import read_scalars

    original = eval_utils.parse_events_files

    @functools.wraps(original)
    def parse_events_files(
        tb_summary_dir: str, seqio_summaries: bool = False
    ) -> dict[str, list[Any]]:
        events = original(tb_summary_dir, seqio_summaries)
        if seqio_summaries or not events:
            return events
        return {
            tag: [eval_utils.Event(step, value) for step, value in points]
            for tag, points in read_scalars(tb_summary_dir).items()
        }

    eval_utils.parse_events_files = parse_events_files


def main() -> None:
    """Runs the module named by the first argument with the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m t0repro.mtf MODULE [the module's own arguments]")
    # The module must see its own name and arguments, as if it had been started directly.
    del sys.argv[0]
    compat.install()
    compat.sum_up_metrics_with_current_pandas()
    from t0repro.tasks.seqio_tasks import read_t5s_vocabulary_as_ours

    read_t5s_vocabulary_as_ours()
    read_events_in_either_form()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
