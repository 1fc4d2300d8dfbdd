"""Records tests/goldens/ from the real Mesh TensorFlow, t5, SeqIO and promptsource; two minutes.

.venv/bin/python -P scripts/dev/make_reference_goldens.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from t0repro import compat

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from tests.goldens import cases  # noqa: E402 - the cases, which are beside their test

PACKAGES = (
    "tensorflow-cpu", "tensorflow-text", "mesh-tensorflow", "t5", "seqio", "promptsource", "numpy",
)  # fmt: skip
MODULE = "t0repro.tasks.demo"
COMMAND = "from t0repro.cli import t5_mesh_transformer as t5; t5.console_entry_point()"


def main() -> None:
    """Writes both files."""
    compat.install()
    from t0repro.tasks.modules import load_tasks

    load_tasks([MODULE, "t0repro.tasks.t0"], into_seqio=True)
    with tempfile.TemporaryDirectory() as folder:
        decoded = decodes(Path(folder))
        arrays = {**batches(Path(folder)), **decoded, **scores(Path(folder), decoded)}
    np.savez_compressed(cases.ARRAYS, **arrays)
    found = {
        "made_by": {name: made_by(name) for name in PACKAGES},
        "rates": rates(),
        "renderings": renderings(),
        "metrics": metrics(),
    }
    cases.JSON.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    for path in (cases.JSON, cases.ARRAYS):
        print(f"{path}: {path.stat().st_size:,} bytes")


def made_by(distribution: str) -> dict[str, str]:
    """A distribution's version, and a digest of its Python files as its installer recorded them."""
    files = importlib.metadata.files(distribution) or ()
    hashed = [file for file in files if file.suffix == ".py" and file.hash]
    lines = sorted(f"{file} {file.hash.value}" for file in hashed if file.hash)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"version": importlib.metadata.version(distribution), "sha256": digest}


def rates() -> dict[str, dict[str, float]]:
    """Mixture -> task -> SeqIO's rate."""
    import seqio

    from t0repro.tasks.registry import prompted_mixtures

    mixtures = {name: seqio.MixtureRegistry.get(name) for name in sorted(prompted_mixtures())}
    return {
        name: {task.name: mixture.get_rate(task) for task in mixture.tasks}
        for name, mixture in mixtures.items()
    }


def renderings() -> dict[str, str | None]:
    """Template -> digest of what promptsource makes of the row; None if it raises."""
    found: dict[str, str | None] = {}
    for name, template, row in cases.templates():
        try:
            parts = template.apply(row)
            found[name] = cases.digest([parts, template.get_answer_choices_list(row)])
        except Exception:
            found[name] = None
    return found


def metrics() -> dict[str, Mapping[str, float]]:
    """Metric -> what t5 computes."""
    from t5.data import glue_utils
    from t5.evaluation import metrics as of_t5

    glue = {
        "matthews_corrcoef": glue_utils.get_glue_metric("cola")[0],
        "mean_3class_f1": glue_utils.get_super_glue_metric("cb")[0],
    }
    found = {}
    for name, (targets, predictions) in cases.METRICS.items():
        if name in ("squad", "trivia_qa"):
            targets = [[target] for target in targets]
        values = (glue.get(name) or getattr(of_t5, name))(targets, predictions)
        found[name] = {key: float(value) for key, value in values.items()}
    return found


def batches(folder: Path) -> dict[str, np.ndarray]:
    """The first batches of each case, from a cache that `t0repro cache` writes."""
    import seqio
    from t5.models import mesh_transformer

    command = ["-m", "t0repro.cli", "cache", f"--mixture={cases.MIXTURE}",
               f"--module_import={MODULE}", f"--min_shards={cases.MIN_SHARDS}",
               f"--output_cache_dir={folder}/cache"]  # fmt: skip
    run_python(command)
    seqio.add_global_cache_dirs([f"{folder}/cache"])
    found = {}
    for name, case in cases.BATCH_CASES.items():
        if case.mesh:
            dataset = mesh_transformer.mesh_train_dataset_fn(
                cases.MIXTURE, cases.LENGTHS, "train", shuffle=case.shuffle, seed=cases.SEED,
                use_cached=True, pack=case.pack,
            ).batch(cases.ROWS)  # fmt: skip
        else:
            dataset = seqio.get_dataset(
                cases.MIXTURE, task_feature_lengths=cases.LENGTHS, dataset_split="train",
                feature_converter=seqio.EncDecFeatureConverter(pack=case.pack),
                shuffle=case.shuffle, use_cached=True, seed=cases.SEED,
                batch_size=cases.ROWS, num_epochs=None, verbose=False,
            )  # fmt: skip
        for number, batch in enumerate(dataset.take(cases.BATCHES).as_numpy_iterator()):
            for feature, values in own_names(batch).items():
                found[f"batches/{name}/{number}/{feature}"] = values.astype(np.int16)
    return found


def own_names(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch's features that a model reads, by this project's names."""
    from t0repro.data.batches import MODEL_FEATURES
    from t0repro.data.train_data import FEATURE_NAMES

    renamed = {FEATURE_NAMES.get(name, name): values for name, values in batch.items()}
    return {name: renamed[name] for name in MODEL_FEATURES if name in renamed}


def decodes(folder: Path) -> dict[str, np.ndarray]:
    """Parameters, inputs and outputs of tests/parity/run_mesh_decode.py."""
    includes = ["include 'defaults.gin'", f"include '{cases.MODEL_GIN}'"]
    job = {
        "module": MODULE,
        "task": cases.MIXTURE,
        "inputs": cases.INPUTS,
        "bindings": "\n".join([*includes, *cases.BINDINGS]),
        "batch_size": cases.DECODED_TOGETHER,
        "half": True,
        "out": f"{folder}/decoded.npz",
        "runs": [
            {
                "beam_size": config.beam_size,
                "alpha": config.alpha,
                "decode_length_multiplier": config.length_multiplier,
                "decode_length_constant": config.length_constant,
                "max_decode_length": config.max_length,
            }
            for config in cases.DECODINGS.values()
        ],
    }
    run_python([str(ROOT / "tests" / "parity" / "run_mesh_decode.py"), json.dumps(job)])
    found = dict(np.load(job["out"]))
    kept = {"decodes/inputs": found["inputs"].astype(np.int16)}
    for name, values in found.items():
        if name.startswith("variables/"):
            kept[name] = values.astype(np.float16)
    for number, name in enumerate(cases.DECODINGS):
        kept[f"decodes/outputs/{name}"] = found[f"outputs/{number}"].astype(np.int16)
        if f"scores/{number}" in found:
            kept[f"decodes/scores/{name}"] = found[f"scores/{number}"][:, 0]
    return kept


def scores(folder: Path, decoded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Task -> Mesh TensorFlow's log-likelihoods of its first pairs, with those parameters."""
    from t0repro.converters.convert import convert
    from t0repro.parameters import naming
    from t0repro.training.checkpoints import save_tree

    tree = {
        naming.PARAMETERS + naming.mtf_to_path(name.removeprefix("variables/")): x.astype(
            np.float32
        )
        for name, x in decoded.items()
        if name.startswith("variables/")
    }
    save_tree(folder / "jax" / "checkpoint_1", {**tree, naming.STEP: np.asarray(1, np.int32)})
    convert(folder / "jax", folder / "mesh", "mtf")
    params = (
        *cases.BINDINGS, f"MIXTURE_NAME = '{cases.EVALUATED}'", "utils.run.mesh_shape = []",
        f"run.sequence_length = {cases.SCORE_LENGTHS}", "run.batch_size = 12",
        "run.dataset_split = 'validation'", "run.eval_checkpoint_step = 1",
        f"mesh_eval_dataset_fn.num_eval_examples = {cases.PAIRS}",
    )  # fmt: skip
    run_python([
        "-c", COMMAND, "--backend=mtf", f"--model_dir={folder}/mesh",
        f"--module_import={MODULE}", "--gin_file=dataset.gin", f"--gin_file={cases.MODEL_GIN}",
        "--gin_file=score_eval.gin", *(f"--gin_param={each}" for each in params),
    ])  # fmt: skip
    found = {}
    for path in sorted((folder / "mesh" / "validation_eval").glob("*_1_predictions")):
        task = path.name.removesuffix("_1_predictions")
        found[f"scores/{task}"] = np.loadtxt(path, np.float32, ndmin=1)
    return found


def run_python(arguments: Sequence[str]) -> None:
    """Runs Python without the checkout's own folder gin/ in its path.

    Raises:
      SystemExit: If it fails.
    """
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


if __name__ == "__main__":
    main()
