"""Examples per second of three ways to cache prompts, on the same real tasks, in one run.

    T0REPRO_DATA_DIR=... T0REPRO_VOCAB=... .venv/bin/python -P scripts/bench/cache.py
    .venv/bin/python -P scripts/bench/cache.py --memory 1000000

1. seqio_cache_tasks as it runs without --pipeline_options: on Beam's DirectRunner, which tries to
   fetch its newer runner (Prism) from the network and, failing that, falls back to FnApiRunner in
   one thread. The fallback is named here, so that no time is spent on the network.
2. T0's way: promptsource's Template.apply on every row, then SeqIO's vocabulary on each text, one
   record at a time.
3. t0repro cache with one worker.

For 1 and 3, times are given for the complete command, imports included, and without its start-up
(the command's time for one task of the demo). Examples are counted in the output. --memory caches
a synthetic split of that many rows with two workers and prints the peak, summed over the process
tree, of resident memory (RSS) and of memory with shared pages counted proportionally (PSS).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BIN = Path(sys.executable).parent
LOCAL = "t0repro.tasks.local"
ANLI = ",".join(f"anli_{name}_r{n}" for name in ("GPT_3_style", "can_we_infer") for n in (1, 2, 3))
TASKS = f"ag_news_classify,{ANLI}"
IMDB = "demo_synthetic_imdb_Reviewer_Enjoyment_Yes_No"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}


def timed(*command: str) -> tuple[float, float]:
    """Wall-clock and processor seconds of a command and its children."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET})
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cached_examples(folder: Path) -> int:
    """Number of examples according to a cache's statistics files."""
    return sum(json.loads(path.read_text())["examples"] for path in folder.glob("*/stats.*.json"))


def seqio_command(module: str, tasks: str, folder: Path) -> list[str]:
    """seqio_cache_tasks on FnApiRunner, which is DirectRunner's fallback."""
    return [
        str(BIN / "seqio_cache_tasks"), f"--module_import={module}", f"--tasks={tasks}",
        f"--output_cache_dir={folder}", "--pipeline_options=--runner=FnApiRunner",
    ]  # fmt: skip


def our_command(module: str, tasks: str, folder: Path, workers: int = 1) -> list[str]:
    """t0repro cache."""
    return [
        str(BIN / "t0repro"), "cache", f"--module_import={module}", f"--tasks={tasks}",
        f"--output_cache_dir={folder}", f"--workers={workers}",
    ]  # fmt: skip


def t0_way(tasks: list[str], rows: int) -> float:
    """Examples per second of Template.apply, SeqIO's vocabulary and tf.train.Example, by row."""
    import importlib

    import seqio
    import tensorflow as tf

    importlib.import_module(LOCAL)
    examples, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with tf.io.TFRecordWriter(str(Path(folder) / "records")) as writer:
            for name in tasks:
                task = seqio.TaskRegistry.get(name)
                vocabulary = task.output_features["inputs"].vocabulary
                template = task.source.template
                for number, row in task.source.rows("validation"):
                    if number == rows:
                        break
                    inputs, targets = template.apply(row)
                    choices = template.get_answer_choices_list(row)
                    example = {
                        "inputs": vocabulary.encode(inputs),
                        "inputs_pretokenized": inputs,
                        "targets": [*vocabulary.encode(targets), vocabulary.eos_id],
                        "targets_pretokenized": targets,
                        "answer_choices": choices,
                    }
                    writer.write(seqio.dict_to_tfexample(example).SerializeToString())
                    examples += 1
    return examples / (time.monotonic() - started)


def compare(tasks: str, folder: Path) -> None:
    """Prints the three rates and how many times as fast ours is as the others."""
    start_seqio, _ = timed(*seqio_command("t0repro.tasks.demo", IMDB, folder / "a"))
    start_ours, _ = timed(*our_command("t0repro.tasks.demo", IMDB, folder / "b"))
    seconds, cpu = timed(*our_command(LOCAL, tasks, folder / "ours"))
    examples = cached_examples(folder / "ours")
    theirs, their_cpu = timed(*seqio_command(LOCAL, tasks, folder / "seqio"))
    assert cached_examples(folder / "seqio") == examples
    rate = t0_way(ANLI.split(","), 100)
    print(f"{examples:,} examples of {tasks}")
    print(f"{'':20} {'whole command':>24} {'less its start':>24}")
    for label, wall, start, used in (
        ("seqio_cache_tasks", theirs, start_seqio, their_cpu),
        ("t0repro cache", seconds, start_ours, cpu),
    ):
        net = max(wall - start, 1e-3)
        print(
            f"{label:20} {wall:7.1f} s {examples / wall:10,.0f}/s {net:9.1f} s"
            f" {examples / net:10,.0f}/s   processor {used:.1f} s"
        )
    print(f"{'Template.apply':20} {'':34} {rate:12,.0f}/s")
    net = max(seconds - start_ours, 1e-3)
    print(
        f"ours: {theirs / seconds:.1f} times seqio_cache_tasks, start-up included;"
        f" {(theirs - start_seqio) / net:.1f} times without; {examples / net / rate:.1f} times"
        " Template.apply"
    )


def renderer(tasks: str) -> None:
    """Prints how much one process renders, tokenizes and writes per second, without start-up."""
    from t0repro.tasks.prompt_cache import shards
    from t0repro.tasks.prompt_cache.plan import Request, make_plan

    folder = Path(tempfile.mkdtemp())
    plan = make_plan(Request((LOCAL,), tuple(tasks.split(",")), (), str(folder / "none")))
    (vocabulary,) = plan.vocabularies.values()
    (folder / "vocabulary").write_bytes(vocabulary)
    spools, rows, examples, started = {}, 0, 0, time.process_time()
    for prompt in plan.prompts:
        for split, source in prompt.rows.items():
            if source not in spools:
                spools[source] = shards.spool_rows(source, str(folder / str(len(spools))))
            forms = {task.score_eval: str(folder) for task in prompt.wanting(split)}
            piece = shards.Piece(
                prompt, split, spools[source].spool, forms, range(16), 16,
                str(folder / "vocabulary"), 0,
            )  # fmt: skip
            result = shards.write_piece(piece)
            rows += result.rows
            examples += sum(each.examples for each in result.statistics.values())
    seconds = time.process_time() - started
    print(
        f"one core, {tasks}: {rows:,} rows, {examples:,} examples,"
        f" {examples / seconds:,.0f} examples per second of processor time"
    )
    shutil.rmtree(folder)


def tree_memory(root: int) -> tuple[int, int]:
    """RSS and PSS in bytes, summed over a process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    rss = pss = 0
    todo = [root]
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = dict(line.split(":") for line in rollup.splitlines()[1:])
        rss += int(sizes["Rss"].split()[0]) * 1024
        pss += int(sizes["Pss"].split()[0]) * 1024
    return rss, pss


def memory(rows: int, folder: Path) -> None:
    """Caches a synthetic split and prints the peak memory of the process tree."""
    data = folder / "data" / "ag_news" / "default"
    data.mkdir(parents=True)
    with open(data / "train.jsonl", "w", encoding="utf-8") as file:
        for number in range(rows):
            text = f"Story {number}: markets moved {number % 97} points as {number % 1009} spoke. "
            file.write(json.dumps({"text": text * 4, "label": number % 4}) + "\n")
    os.environ["T0REPRO_DATA_DIR"] = str(folder / "data")
    command = our_command(LOCAL, "ag_news_classify", folder / "cache", workers=2)
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **QUIET})
    peaks: dict[str, tuple[int, int]] = {"planning": (0, 0), "caching": (0, 0)}

    def watch() -> None:
        while process.poll() is None:
            rss, pss = tree_memory(process.pid)
            # Workers read rows after the planning process has ended.
            phase = "caching" if list(folder.glob("cache/.t0repro-cache/rows-*")) else "planning"
            peaks[phase] = max(peaks[phase][0], rss), max(peaks[phase][1], pss)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    watcher.join()
    seconds = time.monotonic() - started
    print(f"{cached_examples(folder / 'cache'):,} examples in {seconds:.1f} s, two workers")
    for phase, (rss, pss) in peaks.items():
        print(f"{phase}: RSS {rss / 2**20:,.0f} MiB, PSS {pss / 2**20:,.0f} MiB at most")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=TASKS, help="names, of t0repro.tasks.local")
    parser.add_argument("--memory", type=int, metavar="ROWS", help="measure memory instead")
    parser.add_argument("--core", action="store_true", help="measure one process instead")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-cache-"))
    try:
        if arguments.memory:
            memory(arguments.memory, folder)
        elif arguments.core:
            renderer(arguments.tasks)
        else:
            compare(arguments.tasks, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
