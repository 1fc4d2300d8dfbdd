r"""Pairs per second of rank evaluation: ours, T0's way in PyTorch, lm-eval, Mesh TensorFlow.

    JAX_PLATFORMS=cpu python scripts/bench/rank_eval.py --work /tmp/bench --seconds 240 \
        --torch-python <a Python with torch, transformers and lm-eval>

All harnesses use one machine, the same random weights (T5 1.1 small, or base-shaped) and the same
real pairs: for every template with answer choices of the evaluation sets under T0REPRO_DATA_DIR,
the first --limit inputs with all their choices. Results are grouped by number of choices:

    ours      each input encoded once; `compiling` is what the first run took beyond that
    pytorch   as T0's run_eval: inputs repeated for each choice, 8 examples per batch within a task,
              padded to the batch's longest; float32, no gradients
    lm_eval   lm-eval-harness's Hugging Face seq2seq model, batches of 16 pairs sorted by length
    mtf       t5_mesh_transformer --backend=mtf with score_eval.gin at T0's lengths (1024/256);
              rated by the difference of two runs, so that start-up and compilation do not count

The work is split into pieces of about a thousand pairs; of fewer, more of our batches are half
empty than in an evaluation of a whole set. The harnesses take turns on each piece, so that any
other load on the machine affects all of them; results are appended to
<work>/results.jsonl. With --seconds, no piece is started after that time; run it again to continue.
Each run prints what is done so far: pairs per second, their ratio, peak memory of each process, and
the largest difference of a score from ours. If a harness has not done all pieces, its rate is over
those that it did, and ratios compare the same pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {
    "small": {"layers": 8, "d_model": 512, "d_ff": 1024, "num_heads": 6, "d_kv": 64},
    "base": {"layers": 12, "d_model": 768, "d_ff": 2048, "num_heads": 12, "d_kv": 64},
}
VOCABULARY = 32128
HELD_OUT = (
    ("anli", None), ("hellaswag", None), ("super_glue", "cb"), ("super_glue", "copa"),
    ("super_glue", "rte"), ("super_glue", "wic"), ("super_glue", "wsc.fixed"),
    ("winogrande", "winogrande_xl"),
)  # fmt: skip
LENGTHS = {"inputs": 1024, "targets": 256}
PEERS = ("pytorch", "lm_eval")
TORCH_WORKER = Path(__file__).with_name("rank_eval_torch.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", default="bench_rank_eval", help="folder of pairs and results")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=18, help="inputs of each task")
    parser.add_argument("--piece", type=int, default=1200, help="pairs of a piece")
    parser.add_argument("--peers", default=",".join(PEERS), help="whom to measure beside ours")
    parser.add_argument("--peers-every", type=int, default=1, help="peers do every n-th piece")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no piece after")
    parser.add_argument("--torch-python", help="a Python with torch, transformers, lm-eval")
    parser.add_argument("--mtf", action="store_true", help="measure Mesh TensorFlow too")
    parser.add_argument("--read-only", action="store_true", help="only read the pairs")
    options = parser.parse_args()
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    tasks = read_tasks(work, options.limit)
    if options.read_only:
        return
    ours_and_peers(tasks, options, work)
    if options.mtf:
        with tempfile.TemporaryDirectory() as folder:
            mesh_tensorflow(tasks, options, work, Path(folder))
    print_results(work, options.size, options.dtype)


def read_tasks(work: Path, limit: int) -> list[tuple[str, list[dict]]]:
    """(task, examples) of every held-out template whose data is there; cached in the folder."""
    path = work / f"pairs_{limit}.pickle"
    if not path.is_file():
        from t0repro.evaluation.reading import TaskReader

        tasks = [
            (name, list(TaskReader(name, "validation", LENGTHS, limit).examples()))
            for name in register_tasks()
        ]
        path.write_bytes(pickle.dumps(tasks))
    return pickle.loads(path.read_bytes())


def register_tasks() -> list[str]:
    """Registers T0's held-out evaluation tasks whose data is there; returns their names."""
    from t0repro.tasks import prompted_tasks
    from t0repro.tasks.registration import add_prompted_task
    from t0repro.tasks.source import Split
    from t0repro.tasks.templates import load_template, task_name, template_names

    names = []
    for dataset, subset in HELD_OUT:
        rounds = ("_r1", "_r2", "_r3") if dataset == "anli" else ("",)
        for template in template_names(dataset, subset):
            loaded = load_template(dataset, subset, template)
            if not (loaded.answer_choices and loaded.metadata.original_task):
                continue
            for suffix in rounds:
                split = Split(f"dev{suffix}" if suffix else "validation")
                name = task_name(dataset, subset, template) + suffix
                if name not in prompted_tasks():
                    splits = {"validation": split}
                    add_prompted_task(dataset, subset, template, splits, name=name)
                names.append(f"{name}_score_eval")
    return names


def split_into_pieces(tasks: list[tuple[str, list[dict]]], size: int) -> list[dict]:
    """Splits the work by number of choices into pieces: {class, index, work}."""
    classes: dict[str, list[tuple[str, list[dict]]]] = {}
    for name, examples in tasks:
        for group in by_example(examples):
            label = f"{len(group)} choices" if len(group) < 4 else "4 and more"
            classes.setdefault(label, []).append((name, group))
    pieces = []
    for label, found in sorted(classes.items()):
        count = -(-sum(len(group) for _, group in found) // size)
        # Tasks stay together, as T0 evaluates one after the other
        names = list(dict.fromkeys(name for name, _ in found))
        for index in range(count):
            mine = set(names[index::count])
            work = [(name, group) for name, group in found if name in mine]
            pieces.append({"class": label, "index": index, "work": work})
    return sorted(pieces, key=lambda piece: (piece["index"], piece["class"]))


def by_example(examples: list[dict]) -> list[list[dict]]:
    """Groups the examples, which are choices, by input."""
    groups: dict[int, list[dict]] = {}
    for example in examples:
        groups.setdefault(int(example["idx"][0]), []).append(example)
    return list(groups.values())


def read_results(work: Path) -> list[dict]:
    path = work / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def add_result(work: Path, row: dict) -> None:
    with open(work / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def ours_and_peers(tasks: list, options: argparse.Namespace, work: Path) -> None:
    """Measures the pieces that have not been measured yet, as far as time allows."""
    peers = [name for name in options.peers.split(",") if name and options.torch_python]
    pieces = split_into_pieces(tasks, options.piece)
    done = {
        (row["class"], row["index"]): row
        for row in read_results(work)
        if (row["harness"], row["size"], row["dtype"]) == ("ours", options.size, options.dtype)
    }
    left = [piece for piece in pieces if (piece["class"], piece["index"]) not in done]
    if not left:
        return
    params, model = random_model(SIZES[options.size], options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        worker = TorchWorker(options, params, Path(folder)) if peers else None
        started = time.monotonic()
        for piece in left:
            if time.monotonic() - started > options.seconds:
                break
            here = peers if piece["index"] % options.peers_every == 0 else []
            measure(piece, params, model, worker, here, options, work)
        if worker:
            worker.close()


def measure(piece: dict, params, model, worker, peers: list, options, work: Path) -> None:
    """Measures all harnesses on one piece; results are saved once all are done."""
    examples = [example for _, group in piece["work"] for example in group]
    row = {"size": options.size, "dtype": options.dtype}
    row |= {"class": piece["class"], "index": piece["index"]}
    row["pairs"] = len(examples)
    cold, scores, plan = ours(params, model, examples)
    rows = []
    for name in peers:
        seconds, theirs, peak = worker.score(name, piece["work"])
        difference = float(np.abs(scores - theirs).max())
        peer = {"harness": name, "seconds": seconds, "peak_gb": peak, "difference": difference}
        rows.append({**row, **peer})
    warm, _, _ = ours(params, model, examples)
    facts = {"harness": "ours", "seconds": warm, "first_seconds": cold, "peak_gb": peak_memory()}
    rows.append({**row, **facts, "padding": plan.padding, "programs": len(plan.programs)})
    load = os.getloadavg()[0]  # above 2 or 3 on two cores, something else was running too
    for found in [{**found, "load": load} for found in rows]:
        add_result(work, found)
        print(json.dumps(found), flush=True)


def print_results(work: Path, size: str, dtype: str) -> None:
    """Prints a line for each class and harness, and one that sums up how fast ours is."""
    rows = [r for r in read_results(work) if (r["size"], r["dtype"]) == (size, dtype)]
    ours_of = {(r["class"], r["index"]): r for r in rows if r["harness"] == "ours"}
    pairs = sum(r["pairs"] for r in ours_of.values())
    print(f"\nT5 1.1 {size}, {dtype}, random weights; {pairs} pairs")
    ratios = []
    for label in sorted({row["class"] for row in rows if row["harness"] != "mtf"}):
        for harness in ("ours", *PEERS):
            found = [r for r in rows if (r["class"], r["harness"]) == (label, harness)]
            if found:
                print_line(label, harness, found, ours_of)
            if found and harness != "ours":
                ratios.append(f"{label} {times_as_fast(found, ours_of):.2f} x {harness}")
    for row in rows:
        if row["harness"] == "mtf":
            times = row["ours_rate"] / row["rate"]
            print(
                f"mtf, {row['task']} at 1024/256: {row['rate']:.2f} pairs/s; ours on the same"
                f" {row['pairs']} pairs {row['ours_rate']:.1f}, {times:.0f} times; largest"
                f" difference per token {row['difference']:.1e}"
            )
    print(f"ours: {', '.join(ratios)}")


def times_as_fast(found: list[dict], ours_of: dict) -> float:
    """How many times as fast ours scored the same pieces."""
    same = [ours_of[r["class"], r["index"]] for r in found]
    return sum(r["seconds"] for r in found) / sum(r["seconds"] for r in same)


def print_line(label: str, harness: str, found: list[dict], ours_of: dict) -> None:
    pairs, seconds = sum(r["pairs"] for r in found), sum(r["seconds"] for r in found)
    peak = max(r["peak_gb"] for r in found)
    line = f"{label:11} {harness:8} {pairs:5} pairs {pairs / seconds:7.1f}/s, {peak:.2f} GB"
    line += f" (load {max(r['load'] for r in found):.1f})"
    if harness == "ours":
        compiling = sum(max(r["first_seconds"] - r["seconds"], 0) for r in found)
        padding = sum(r["padding"] * r["pairs"] for r in found) / pairs
        line += f", {100 * padding:.0f}% padding, compiling {compiling:.0f} s more"
    else:
        ratio = times_as_fast(found, ours_of)
        difference = max(r["difference"] for r in found)
        line += f"; ours is {ratio:.2f} times as fast; largest difference {difference:.1e}"
    print(line)


def random_model(size: dict, dtype: str = "float32"):
    """Parameters and model; those that `rank-eval` casts when it opens a checkpoint are cast."""
    import jax

    from t0repro.config.model import DTypePolicy
    from t0repro.config.recipe import t5_1_1
    from t0repro.model.t5 import T5, evaluation_shapes, initial_parameters

    widths = {name: value for name, value in size.items() if name != "layers"}
    config = t5_1_1(num_layers=size["layers"], vocab_size=VOCABULARY, **widths)
    model = T5(config, DTypePolicy("float32", "float32", dtype))
    params = initial_parameters(model, jax.random.key(0))
    shapes = evaluation_shapes(model, params)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), params, shapes), model


def ours(params: dict, model, examples: list[dict]):
    """Seconds, scores and plan; everything from token ids to scores is timed."""
    from t0repro.evaluation.engine import Engine
    from t0repro.evaluation.pairs import collect_pairs

    started = time.perf_counter()
    pairs = collect_pairs(examples, LENGTHS)
    engine, scores = Engine(params, model), np.zeros(len(pairs))
    plan = engine.plan(pairs)
    for found in engine.run(pairs, plan):
        scores[found.pairs] = found.scores
    return time.perf_counter() - started, pairs.expand_to_examples(scores), plan


def peak_memory() -> float:
    """Peak resident memory of this process in GB."""
    # Not getrusage's figure, which for a child process starts at its parent's value.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


def flat(params: dict) -> dict[str, np.ndarray]:
    import flax.traverse_util

    found = flax.traverse_util.flatten_dict(params, sep="/")
    return {f"target/{name}": np.asarray(value) for name, value in found.items()}


# PyTorch -----------------------------------------------------------------------------------------


class TorchWorker:
    """transformers' T5 with our weights in its own process, driven over pipes."""

    def __init__(self, options: argparse.Namespace, params: dict, folder: Path):
        weights = {name: value.astype(np.float32) for name, value in flat(params).items()}
        np.savez(folder / "weights.npz", **weights)
        config = {**SIZES[options.size], "dtype": options.dtype}
        (folder / "config.json").write_text(json.dumps(config))
        self.folder = folder
        self.process = subprocess.Popen(
            [options.torch_python, str(TORCH_WORKER), str(folder)],
            # Waiting threads yield. Otherwise PyTorch suffers most when others compute on the
            # same two cores: at a load of 4 it did 6 pairs per second instead of 16.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the process with PyTorch ended")
        return line.strip()

    def score(
        self, harness: str, found: list[tuple[str, list[dict]]]
    ) -> tuple[float, np.ndarray, float]:
        """Seconds, the scores of all examples' choices in order, and peak memory in GB."""
        work = [
            {
                "task": name,
                "inputs": group[0]["inputs"].tolist(),
                "choices": [example["targets"].tolist() for example in group],
            }
            for name, group in found
        ]
        (self.folder / "work.json").write_text(json.dumps(work))
        assert self.process.stdin is not None
        print(harness, file=self.process.stdin, flush=True)
        seconds, peak = map(float, self._answer().split())
        return seconds, np.load(self.folder / "scores.npy"), peak

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# Mesh TensorFlow ---------------------------------------------------------------------------------


def mesh_tensorflow(tasks, options: argparse.Namespace, work: Path, folder: Path) -> None:
    """Measures score_eval at T0's lengths on one task: its rate, and agreement with our scores."""
    from t0repro.converters.convert import convert
    from t0repro.evaluation.engine import score_examples
    from t0repro.evaluation.outputs import read_task_scores
    from t0repro.training.checkpoints import save_tree

    if any((r["size"], r["harness"]) == (options.size, "mtf") for r in read_results(work)):
        return
    params, model = random_model(SIZES[options.size])
    name, examples = next((name, found) for name, found in tasks if len(found) >= 36)
    save_tree(folder / "jax/checkpoint_0", {**flat(params), "state/step": np.int32(0)})
    convert(str(folder / "jax"), str(folder / "mtf"), "mtf", slots=False)
    # The rate is that of the 24 further pairs: start-up and compilation cancel out.
    seconds = {}
    for count in (12, 36):  # whole examples of two, three or four choices
        started = time.perf_counter()
        run_mesh_tensorflow(folder / "mtf", name, options.size, count, folder / f"eval_{count}")
        seconds[count] = time.perf_counter() - started
    warm, scores = {}, np.zeros(0)
    for _ in range(2):
        started = time.perf_counter()
        scores = score_examples(params, model, examples[:36], LENGTHS)
        warm = time.perf_counter() - started
    (theirs,) = read_task_scores(folder / "eval_36")
    difference = np.abs(theirs.score - scores) / theirs.target_length
    row = {"size": options.size, "dtype": "float32", "harness": "mtf", "pairs": 36}
    row |= {"class": name, "task": name}
    row["rate"] = 24 / (seconds[36] - seconds[12])
    row["ours_rate"] = 36 / warm
    add_result(work, {**row, "difference": float(difference.max())})


def run_mesh_tensorflow(model_dir: Path, task: str, size: str, count: int, out: Path) -> None:
    command = (
        "from t0repro.cli.t5_mesh_transformer import console_entry_point; console_entry_point()"
    )
    here = str(Path(__file__).parent)
    params = [
        f"MIXTURE_NAME = '{task}'",
        "run.dataset_split = 'validation'",
        "run.batch_size = ('sequences_per_batch', 8)",
        "run.sequence_length = {'inputs': 1024, 'targets': 256}",
        f"mesh_eval_dataset_fn.num_eval_examples = {count}",
        "eval_checkpoint_step = 0",
        f"run.eval_summary_dir = '{out}'",
        "utils.run.mesh_shape = []",
        "utils.get_variable_dtype.master_dtype = 'float32'",
        "utils.get_variable_dtype.slice_dtype = 'float32'",
        "utils.get_variable_dtype.activation_dtype = 'float32'",
        "mesh_train_dataset_fn.use_cached = False",
        "mesh_eval_dataset_fn.use_cached = False",
    ]
    code = f"import sys; sys.path.insert(0, {here!r}); import rank_eval; rank_eval.register_tasks()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {command}", "--backend=mtf", f"--model_dir={model_dir}"]
        + [f"--gin_file={name}" for name in ("dataset.gin", f"models/t5.1.1.{size}.gin")]
        + ["--gin_file=score_eval.gin", *(f"--gin_param={param}" for param in params)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])


if __name__ == "__main__":
    main()
