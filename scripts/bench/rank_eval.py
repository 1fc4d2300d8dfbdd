"""Pairs per second of rank evaluation: ours, T0's way in PyTorch, Mesh TensorFlow's score_eval.

    JAX_PLATFORMS=cpu python scripts/bench/rank_eval.py --mtf --torch-python <a Python with torch>

One run, one machine, the same random weights (T5 1.1 small, or base-shaped) and the same real
pairs: every template with answer choices of the evaluation sets under T0REPRO_DATA_DIR, the first
--limit inputs of each, each with all of its choices. Harnesses take turns within each class of
examples (two choices, three, four and more):

    ours          each input encoded once; `cold` compiles, `warm` is the same work once more
    pytorch       as T0's run_eval: inputs repeated for each choice, 8 examples a batch within a
                  task, padded to the batch's longest; float32, no gradients
    mtf           t5_mesh_transformer --backend=mtf with score_eval.gin at T0's lengths (1024/256);
                  its rate is that of the pairs between two runs, so that start and compilation do
                  not count

Prints pairs per second, peak memory of each process and the largest difference in score from ours.
"""

from __future__ import annotations

import argparse
import json
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
EXAMPLES_A_BATCH = 8  # Hugging Face's per_device_eval_batch_size
HELD_OUT = (
    ("anli", None), ("hellaswag", None), ("super_glue", "cb"), ("super_glue", "copa"),
    ("super_glue", "rte"), ("super_glue", "wic"), ("super_glue", "wsc.fixed"),
    ("winogrande", "winogrande_xl"),
)  # fmt: skip
LENGTHS = {"inputs": 1024, "targets": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--limit", type=int, default=16, help="inputs of each task")
    parser.add_argument("--share", type=int, default=1, help="take every n-th task only")
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--mtf", action="store_true", help="measure Mesh TensorFlow too")
    parser.add_argument("--torch-worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_worker:
        torch_worker(Path(options.torch_worker))
        return
    tasks = read_tasks(options.limit, options.share)
    with tempfile.TemporaryDirectory() as folder:
        compare(tasks, options, Path(folder))


def read_tasks(limit: int, share: int) -> list[tuple[str, list[dict]]]:
    """(task, examples) of every held-out template at hand."""
    from t0repro.evaluation.rank_tasks import read_task

    return [
        (name, read_task(name, "validation", LENGTHS, limit).examples)
        for name in register_tasks()[::share]
    ]


def register_tasks() -> list[str]:
    """Registers T0's held-out evaluation tasks whose data is there; their names."""
    from t0repro.tasks import prompted_tasks
    from t0repro.tasks.registration import add_prompted_task
    from t0repro.tasks.splits import Split
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


def compare(tasks: list[tuple[str, list[dict]]], options: argparse.Namespace, folder: Path) -> None:
    """Measures all harnesses and prints what they gave."""
    params, model = random_model(SIZES[options.size])
    classes = {"2 choices": [], "3 choices": [], "4 and more": []}
    for name, examples in tasks:
        for group in by_example(examples):
            label = f"{len(group)} choices" if len(group) < 4 else "4 and more"
            classes.setdefault(label, []).append((name, group))
    total = sum(len(group) for found in classes.values() for _, group in found)
    print(f"T5 1.1 {options.size}, random weights: {len(tasks)} tasks, {total} pairs", flush=True)
    worker = TorchWorker(options, params, folder) if options.torch_python else None
    for label, found in classes.items():
        if not found:
            continue
        examples = [example for _, group in found for example in group]
        cold, scores, plan = ours(params, model, examples)
        other = worker.score(found) if worker else None
        warm, _, _ = ours(params, model, examples)
        row = {
            "class": label,
            "pairs": len(examples),
            "ours_cold": len(examples) / cold,
            "ours_warm": len(examples) / warm,
            "padding": plan.padding,
            "shapes": len(plan.shapes),
        }
        if other:
            seconds, theirs = other
            row["pytorch"] = len(examples) / seconds
            row["ratio_cold"], row["ratio_warm"] = seconds / cold, seconds / warm
            row["largest_difference"] = float(np.abs(scores - theirs).max())
        print(json.dumps(row), flush=True)
    print(f"ours: peak memory {peak_memory():.2f} GB")
    if worker:
        print(f"pytorch: peak memory {worker.close():.2f} GB")
    if options.mtf:
        mesh_tensorflow(params, model, tasks, options, folder)


def by_example(examples: list[dict]) -> list[list[dict]]:
    """The choices of each input together."""
    groups: dict[int, list[dict]] = {}
    for example in examples:
        groups.setdefault(int(example["idx"][0]), []).append(example)
    return list(groups.values())


def random_model(size: dict):
    import jax

    from t0repro.config.run_config import DTypePolicy, ModelConfig
    from t0repro.model.t5 import T5, initial_parameters

    config = ModelConfig(
        num_encoder_layers=size["layers"],
        num_decoder_layers=size["layers"],
        vocab_size=VOCABULARY,
        activations=("gelu", "linear"),
        logits_from_embedding=False,
        relative_attention_num_buckets=32,
        dropout_rate=0.0,
        label_smoothing=0.0,
        z_loss=0.0,
        loss_denominator=None,
        **{name: value for name, value in size.items() if name != "layers"},
    )
    model = T5(config, DTypePolicy("float32", "float32", "float32"))
    return initial_parameters(model, jax.random.key(0)), model


def ours(params: dict, model, examples: list[dict]):
    """Seconds, scores and plan; everything from token ids to scores is timed."""
    from t0repro.evaluation.engine import TOKENS_PER_BATCH, Engine
    from t0repro.evaluation.grouping import make_plan
    from t0repro.evaluation.pairs import distinct_pairs

    started = time.perf_counter()
    pairs = distinct_pairs(examples, LENGTHS)
    plan = make_plan(pairs, TOKENS_PER_BATCH["cpu"])
    scores = np.zeros(len(pairs))
    for found in Engine(params, model).run(pairs, plan):
        scores[found.pairs] = found.scores
    return time.perf_counter() - started, pairs.of_examples(scores), plan


def peak_memory() -> float:
    """Gigabytes of this process at its largest."""
    # Not getrusage's, which a child begins with its parent's
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


def flat(params: dict) -> dict[str, np.ndarray]:
    import flax.traverse_util

    found = flax.traverse_util.flatten_dict(params, sep="/")
    return {f"target/{name}": np.asarray(value) for name, value in found.items()}


# PyTorch -----------------------------------------------------------------------------------------


class TorchWorker:
    """transformers' T5 with our weights in a process of its own, asked over pipes."""

    def __init__(self, options: argparse.Namespace, params: dict, folder: Path):
        np.savez(folder / "weights.npz", **flat(params))
        size = SIZES[options.size]
        (folder / "config.json").write_text(json.dumps(size))
        self.folder = folder
        self.process = subprocess.Popen(
            [options.torch_python, __file__, f"--torch-worker={folder}"],
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

    def score(self, found: list[tuple[str, list[dict]]]) -> tuple[float, np.ndarray]:
        """Seconds and scores of all choices of examples, in order."""
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
        print("score", file=self.process.stdin, flush=True)
        seconds = float(self._answer())
        return seconds, np.load(self.folder / "scores.npy")

    def close(self) -> float:
        """Ends the process; gigabytes that it took."""
        assert self.process.stdin is not None
        print("end", file=self.process.stdin, flush=True)
        peak = float(self._answer())
        self.process.wait()
        return peak


def torch_worker(folder: Path) -> None:
    """Answers "score" with seconds until "end"."""
    model = torch_model(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() != "score":
            break
        work = json.loads((folder / "work.json").read_text())
        started = time.perf_counter()
        scores = torch_scores(model, work)
        seconds = time.perf_counter() - started
        np.save(folder / "scores.npy", np.array(scores))
        print(seconds, flush=True)
    print(peak_memory(), flush=True)


def torch_model(folder: Path):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    size = json.loads((folder / "config.json").read_text())
    config = T5Config(
        vocab_size=VOCABULARY,
        num_layers=size["layers"],
        d_model=size["d_model"],
        d_ff=size["d_ff"],
        num_heads=size["num_heads"],
        d_kv=size["d_kv"],
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    # transformers 5 ties the logits to the embedding whatever the configuration says
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    weights = np.load(folder / "weights.npz")
    state = {}
    for name in weights.files:
        value = torch.from_numpy(weights[name])
        for key, transposed in torch_names(name.removeprefix("target/")):
            state[key] = value.T.contiguous() if transposed else value
    model.load_state_dict(state, strict=True)
    return model


def torch_names(path: str) -> list[tuple[str, bool]]:
    """Names in transformers of a T5X parameter, and whether it is transposed there."""
    if path == "token_embedder/embedding":
        names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return [(f"{name}.weight", False) for name in names]
    if path == "decoder/logits_dense/kernel":
        return [("lm_head.weight", True)]
    tower, *rest = path.split("/")
    if rest[0] == "relpos_bias":
        name = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return [(name, True)]
    if rest[0].endswith("_norm"):
        return [(f"{tower}.final_layer_norm.weight", False)]
    block, part = f"{tower}.block.{rest[0].removeprefix('layers_')}.layer", rest[1]
    last = 1 if tower == "encoder" else 2
    norms = {
        "pre_attention_layer_norm": 0,
        "pre_self_attention_layer_norm": 0,
        "pre_cross_attention_layer_norm": 1,
        "pre_mlp_layer_norm": last,
    }
    if part in norms:
        return [(f"{block}.{norms[part]}.layer_norm.weight", False)]
    if part == "mlp":
        return [(f"{block}.{last}.DenseReluDense.{rest[2]}.weight", True)]
    place = "1.EncDecAttention" if part == "encoder_decoder_attention" else "0.SelfAttention"
    letter = {"query": "q", "key": "k", "value": "v", "out": "o"}[rest[2]]
    return [(f"{block}.{place}.{letter}.weight", True)]


def torch_scores(model, work: list[dict]) -> list[float]:
    """T0's run_eval: a batch is some examples of one task, inputs repeated for each choice."""
    scores: list[float] = []
    start = 0
    while start < len(work):
        end = start
        while (
            end < len(work)
            and end - start < EXAMPLES_A_BATCH
            and work[end]["task"] == work[start]["task"]
        ):
            end += 1
        inputs = [e["inputs"] for e in work[start:end] for _ in e["choices"]]
        targets = [choice for e in work[start:end] for choice in e["choices"]]
        scores += torch_batch(model, inputs, targets)
        start = end
    return scores


def torch_batch(model, inputs: list[list[int]], targets: list[list[int]]) -> list[float]:
    import torch

    def padded(rows: list[list[int]]):
        length = max(map(len, rows))
        return torch.tensor([row + [0] * (length - len(row)) for row in rows])

    ids, labels = padded(inputs), padded(targets)
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=(ids > 0).long(),
            labels=labels,
            decoder_attention_mask=(labels > 0).long(),
        ).logits
        log_p = torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0]
        return (log_p * (labels > 0)).sum(-1).tolist()


# Mesh TensorFlow ---------------------------------------------------------------------------------


def mesh_tensorflow(params: dict, model, tasks, options: argparse.Namespace, folder: Path) -> None:
    """score_eval at T0's lengths on one task: its rate between 16 and 48 pairs, and agreement."""
    from t0repro.converters.convert import convert
    from t0repro.evaluation.engine import score_examples
    from t0repro.evaluation.outputs import read_task_scores
    from t0repro.training.checkpoints import save_tree

    name, examples = next((name, found) for name, found in tasks if len(found) >= 48)
    save_tree(folder / "jax/checkpoint_0", {**flat(params), "state/step": np.int32(0)})
    convert(str(folder / "jax"), str(folder / "mtf"), "mtf", slots=False)
    seconds = {}
    for count in (16, 48):
        started = time.perf_counter()
        run_mesh_tensorflow(folder / "mtf", name, options.size, count, folder / f"eval_{count}")
        seconds[count] = time.perf_counter() - started
    rate = 32 / (seconds[48] - seconds[16])
    warm, scores = {}, np.zeros(0)
    for _ in range(2):
        started = time.perf_counter()
        scores = score_examples(params, model, examples[:48], LENGTHS)
        warm = time.perf_counter() - started
    (theirs,) = read_task_scores(folder / "eval_48")
    difference = np.abs(theirs.score - scores) / theirs.target_length
    print(
        f"mtf: {rate:.3f} pairs/s ({name}, 1024/256); ours on the same 48 pairs {48 / warm:.1f}"
        f" pairs/s, {48 / warm / rate:.0f} times; largest difference per token"
        f" {difference.max():.1e}"
    )


def run_mesh_tensorflow(model_dir: Path, task: str, size: str, count: int, out: Path) -> None:
    command = "from t0repro.mesh.main import console_entry_point; console_entry_point()"
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
