"""A newcomer's first hour with a network: pages run from their first line to their last.

A server of this machine stands for the hub and for Google's storage. It serves small files in the
form in which the real ones are released: the vocabulary with its 100 sentinels inside, sharded
safetensors with their index, rows as Parquet on the hub's own branch. No variable is set but those
by which clients find the servers, and those that keep their caches in the test's folder.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import safetensors.numpy

from t0repro.config.t5x.run import read_eval_run
from t0repro.converters.convert import convert

from .converters.released_servers import Handler, Server
from .helpers import commands
from .helpers.docs_commands import ROOT, failures
from .helpers.docs_commands import commands as commands_of
from .helpers.loopback import running
from .runs.tiny_gin import parsed, save_checkpoint
from .tasks.vocabularies import write_vocabulary

pytestmark = pytest.mark.always
COMMIT = "c0ffee" * 6 + "c0de"
VOCABULARY = "t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"

# (page, pattern, what is run in its place): as the pages say it, with fewer steps and tokens.
CUT = [
    ("howto_data.md", r"bash scripts/train\.sh", "TRAIN_STEPS=2 bash scripts/train.sh"),
    ("howto_checkpoint.md", r"--limit 100", "--limit 2"),
    ("howto_checkpoint.md", r"TRAIN_STEPS=1000", "TRAIN_STEPS=2"),
    ("howto_t0_3b.md", r"1112200", "1100002"),
    ("howto_t0_3b.md", r"1048576", "1024"),
    ("howto_t0_3b.md", r"'inputs': 1024, 'targets': 256", "'inputs': 64, 'targets': 16"),
    ("howto_t0_3b.md", r"per_replica = 1024", "per_replica = 64"),
    ("quickstart.md", r"bash scripts/quickstart\.sh", "TRAIN_STEPS=2 bash scripts/quickstart.sh"),
]
# The environment is the one that runs the tests; nobody has DIR.
SKIPPED = r"bash scripts/setup\.sh|^T0REPRO_DATA_DIR=DIR "

# T0-3B's gin file, with a model that trains here. A reader's file comes before the package's.
SMALL = """include 'models/t5.1.1.base.gin'
d_model = 8
d_ff = 16
num_layers = 2
num_heads = 4
d_kv = 3
"""
ROWS = {
    "cornell-movie-review-data/rotten_tomatoes/default": {
        "text": ["A quiet, lovely film.", "Two hours that I want back."],
        "label": [1, 0],
    },
    "aps/super_glue/rte": {
        "premise": ["It rained all day.", "The river rose."],
        "hypothesis": ["It was wet.", "It was dry."],
        "idx": [0, 1],
        "label": [0, 1],
    },
}
CLASSES = {"default": ["neg", "pos"], "rte": ["entailment", "not_entailment"]}


class _Handler(Handler):
    """What is asked of the hub and of the storage in the pages."""

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        if about := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/(.+)", path):
            self._about_dataset(about[1])
        elif path.startswith("/datasets/"):
            self._dataset_file(path, body=True)
        elif path == f"/{VOCABULARY}":
            self._bytes(VOCABULARY)
        else:
            super().do_GET()

    def do_HEAD(self):
        self._dataset_file(unquote(self.path.partition("?")[0]), body=False)

    def _about_dataset(self, name):
        root = self.server.root / "datasets" / name
        files = sorted(each for each in root.rglob("*") if each.is_file())
        siblings = [{"rfilename": str(each.relative_to(root))} for each in files]
        about = {"id": name, "sha": COMMIT, "siblings": siblings}
        self.send(200 if files else 404, json.dumps(about).encode())

    def _dataset_file(self, path, body):
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        found = file and self.server.root / "datasets" / file[1] / file[2]
        if not found or not found.is_file():
            return self.send(404, b"")
        content = found.read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        self.send_response(200)
        for key, value in {
            "Content-Length": len(content), "ETag": f'"{tag}"', "X-Repo-Commit": COMMIT,
            "X-Linked-Size": len(content), "X-Linked-ETag": f'"{tag}"',
        }.items():  # fmt: skip
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _write_rows(root: Path) -> None:
    import datasets

    for place, columns in ROWS.items():
        features = datasets.Features(
            {name: datasets.Value("int32" if name == "idx" else "string") for name in columns}
            | {"label": datasets.ClassLabel(names=CLASSES[Path(place).name])}
        )
        rows = datasets.Dataset.from_dict(columns, features=features)
        for split in ("train", "validation", "test"):
            path = root / "datasets" / place / split / "0000.parquet"
            path.parent.mkdir(parents=True)
            rows.to_parquet(str(path))


def _write_checkpoints(root: Path, folder: Path) -> None:
    """The LM-adapted checkpoint in the bucket, and T0-3B on the hub."""
    macros = [f"{name} = 'x'" for name in ("MIXTURE_OR_TASK_NAME", "CHECKPOINT_PATH")]
    sizes = ("network.T5Config.vocab_size = 32128", "EVAL_OUTPUT_DIR = 'x'")
    plan = read_eval_run(parsed("eval", "eval", *macros, *sizes))
    made = save_checkpoint(folder / "made", plan, 1100000)
    bucket = root / "pretrained_models" / "t5.1.1.lm100k.xl"
    convert(made, bucket, "mtf")
    (bucket / "operative_config.gin").write_text("# as it was trained\n")
    hub = root / "bigscience" / "T0_3B" / "main"
    plain = write_vocabulary(folder / "spiece.model", pieces=32000)
    convert(made, hub, "hf", vocabulary=str(plain))
    _shard(hub)


def _shard(folder: Path) -> None:
    """Exchanges a transformers folder's weights for two shards and the hub's index."""
    whole = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": {}}
    for number, part in enumerate(np.array_split(names, 2), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.numpy.save_file(
            {name: tensors[name] for name in map(str, part)}, folder / file, {"format": "pt"}
        )
        index["weight_map"] |= dict.fromkeys(map(str, part), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The servers' address."""
    folder = tmp_path_factory.mktemp("network")
    root = folder / "served"
    (root / VOCABULARY).parent.mkdir(parents=True)
    write_vocabulary(root / VOCABULARY, pieces=32100, inside=100)
    _write_rows(root)
    _write_checkpoints(root, folder)
    with running(Server(root, _Handler)) as server:
        yield server.url


@pytest.fixture
def newcomer(network, tmp_path):
    """(folder, environment) of somebody who has a checkout and a network."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("tasks", "docker", ".venv"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "scripts" / "setup.sh").write_text("")
    (folder / "models").mkdir()
    (folder / "models" / "t5.1.1.xl.gin").write_text(SMALL)
    kept = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("T0REPRO_", "HF_", "XDG_"))
    }  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    servers = {"HF_ENDPOINT": network, "STORAGE_EMULATOR_HOST": network}
    caches = {"HF_HOME": f"{tmp_path}/huggingface", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    return folder, {**kept, "PATH": path, **servers, **caches}


def run_page(name: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Runs a page's commands; returns the failures."""
    page = ROOT / "docs" / name
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        (folder / "my_prompts.yaml").write_text(text)
    lines = []
    for each in commands_of(page):
        if re.search(SKIPPED, each):
            continue
        line = re.sub(r"\s*\\\n\s*", " ", each)
        for where, pattern, instead in CUT:
            line = re.sub(pattern, instead, line) if where == name else line
        lines.append(line)
    return list(failures(name, lines, folder, env))


def test_the_rows_and_the_vocabulary_of_the_training_guide_come_from_the_network(newcomer):
    folder, env = newcomer
    (cache,) = [
        each for each in commands_of(ROOT / "docs/howto_t0_3b.md") if "t0repro cache" in each
    ]
    assert cache.startswith("T0REPRO_DATA_HUB=1 t0repro ")
    done = commands.run(
        *cache.removeprefix("T0REPRO_DATA_HUB=1 ").split(), cwd=folder,
        env={**env, "T0REPRO_DATA_HUB": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(
        (
            folder / "runs/cache/rotten_tomatoes_Movie_Expressed_Sentiment/provenance.json"
        ).read_text()
    )
    origin = made["splits"]["train"]["origin"]
    assert origin["repository"] == "cornell-movie-review-data/rotten_tomatoes"
    assert origin["commit"] == COMMIT and made["splits"]["train"]["examples"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    # The second page of a group goes on in the folder of the first.
    "pages",
    [["quickstart.md"], ["howto_data.md", "howto_checkpoint.md"], ["howto_t0_3b.md"]],
)
def test_the_first_hour_runs_from_the_first_line_to_the_last(newcomer, pages):
    assert [failed for page in pages for failed in run_page(page, *newcomer)] == []


def test_every_cut_is_of_some_command():
    for name, pattern, _ in CUT:
        found = commands_of(ROOT / "docs" / name)
        assert any(re.search(pattern, re.sub(r"\s*\\\n\s*", " ", each)) for each in found), pattern
