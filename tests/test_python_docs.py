"""Every block of Python on the pages runs, in its order, and does what docs/python.md says."""

import re
import shutil
import subprocess
import sys

import numpy as np
from safetensors.numpy import save_file

import t0repro
from t0repro import compat
from t0repro.reports.report_files import write_report
from t0repro.reports.score_tables import write_tables
from t0repro.tasks.demo.datasets import VOCABULARY

from .helpers.docs_commands import ROOT, fenced_blocks, pages
from .reports.suites import report_of, small_suite
from .tasks.prompt_caches import make

TASK = "demo_synthetic_glue_mrpc_paraphrase"


def what_the_page_needs(folder):
    """The files that the page says are there."""
    import t0repro.tasks.demo  # noqa: F401

    make(folder / "runs" / "cache", TASK, min_shards=1)
    # Where a checkout has it.
    (demo := folder / "tasks" / "demo").mkdir(parents=True)
    shutil.copy(VOCABULARY, demo / "sentencepiece.model")
    suite = small_suite(folder / "suite" / "validation_eval")
    write_report(report_of(suite), folder / "runs" / "eval")
    write_tables(suite.folder, 20, suite.prompts, folder / "runs" / "eval")
    (rows := folder / "rows" / "my_reviews" / "default").mkdir(parents=True)
    (rows / "train.jsonl").write_text('{"text": "Lovely.", "label": 1}\n')
    guide = (ROOT / "docs" / "howto_data.md").read_text()
    (prompts,) = re.findall(r"```yaml\n(.*?)```", guide, re.S)
    (folder / "my_prompts.yaml").write_text(prompts)


def test_every_block_of_the_python_page_runs(tmp_path, monkeypatch, capsys):
    what_the_page_needs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("T0REPRO_DATA_DIR", "rows")
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    namespace = run_blocks(ROOT / "docs" / "python.md")
    assert int(namespace["state"].step) == 20
    assert namespace["scores"].shape == (2, 2) and np.isfinite(namespace["scores"]).all()
    table = namespace["table"]
    assert set(table.dataset) == {"ag_news", "super_glue/rte"} and len(table) == 5
    assert {"score", "predicted"} <= set(namespace["pairs"].columns)
    assert [task.name for task in namespace["tasks"]] == [
        "my_reviews_was_it_good",
        "my_reviews_recommend",
    ]
    # The model that the page trained stands for those of other pages.
    for name in ("t0_3b", "t5_encoder"):
        (tmp_path / name).symlink_to("runs/mine")
    encoded = t0repro.encode("t5_encoder", ["It rained."], batch_size=1)
    offsets = np.array([0, len(encoded[0])])
    save_file({"embeddings": encoded[0], "offsets": offsets}, "prompts.safetensors")
    namespace = run_blocks(ROOT / "README.md")
    assert namespace["scores"].shape == (1, 2) and np.isfinite(namespace["scores"]).all()
    namespace = run_blocks(ROOT / "docs" / "howto_encode.md")
    assert namespace["first"].shape == encoded[0].shape
    assert namespace["vectors"].shape == (2, 32)


def test_from_t0_s_task_of_a_tsv_file_has_the_tokens_of_t5_s_function(tmp_path, monkeypatch):
    compat.install()
    import seqio
    from t5.models.mesh_transformer import tsv_dataset_fn

    monkeypatch.chdir(tmp_path)
    shutil.copy(VOCABULARY, "sentencepiece.model")
    (tmp_path / "train.tsv").write_text('"It rained," she said. "So\twet "\n')
    try:
        vocabulary = run_blocks(ROOT / "docs" / "from_t0.md")["vocabulary"]
        for length in (64, 4):
            lengths = {"inputs": length, "targets": 4}
            task = seqio.get_mixture_or_task("my_tsv")
            (ours,) = task.get_dataset(lengths, "train", shuffle=False).as_numpy_iterator()
            (peer,) = tsv_dataset_fn("train.tsv", lengths, "train", vocabulary).as_numpy_iterator()
            for name in lengths:
                np.testing.assert_array_equal(np.trim_zeros(peer[name], "b"), ours[name])
    finally:
        seqio.TaskRegistry.remove("my_tsv")


def run_blocks(page):
    """Runs a page's blocks of Python in one module; returns its names."""
    namespace = {"__name__": "the_page"}
    for language, block in fenced_blocks(page.read_text()):
        if language == "python":
            exec(compile(block, str(page), "exec"), namespace)
    return namespace


def test_every_page_with_python_is_run():
    """Those of this module; tests/training/test_trainer_docs.py runs the trainer's page."""
    with_python = {page.name for page in pages()
                   if "python" in dict(fenced_blocks(page.read_text()))}  # fmt: skip
    assert with_python == {
        "README.md",
        "from_t0.md",
        "howto_encode.md",
        "python.md",
        "trainer.md",
    }


def test_importing_t0repro_imports_nothing_heavy():
    code = "import sys, t0repro; print({'jax', 'numpy', 'rich', 'typer'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
