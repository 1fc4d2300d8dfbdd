"""Reading a stranger's file executes nothing: no code here can unpickle, and no reader does."""

import ast
import contextlib
import os
import pickle
import shutil
import sys
from pathlib import Path

import flax.traverse_util
import jax
import msgpack
import numpy as np
import pytest
import tensorflow as tf
import yaml

import t0repro
import t0repro.converters
import t0repro.tasks
from t0repro.converters.convert import convert
from t0repro.converters.sources import load_any
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.score_journal import DIGEST, ScoreJournal
from t0repro.model.t5 import T5, initial_parameters
from t0repro.parity.mesh_jobs import load_batches
from t0repro.reports.report import load_report
from t0repro.tasks.prompt_cache.records import read_records
from t0repro.tasks.template_files import read_template_file
from t0repro.training.checkpoints import load_tree, save_tree

from .helpers import tiny_models
from .reports.scored_folder import write_scores
from .tasks.prompt_caches import make

_FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "jsonpickle", "pickletools", "code", "codeop",
}  # fmt: skip
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
_UNSAFE_YAML = {"unsafe_load", "full_load", "unsafe_load_all", "full_load_all", "UnsafeLoader"}


def sources():
    folders = [Path(part) for module in (t0repro, t0repro.tasks, t0repro.converters)
               for part in module.__path__]  # fmt: skip
    files = {path for folder in folders for path in folder.rglob("*.py")}
    assert files
    return sorted(files)


def violations(tree: ast.AST) -> list[str]:
    """What in a module's syntax could execute what it reads, with its line."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: imports {name}" for name in names
                  if name.partition(".")[0] in _FORBIDDEN_MODULES]  # fmt: skip
        if isinstance(node, ast.Attribute) and node.attr in _UNSAFE_YAML:
            found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.Call):
            found += _unsafe_call(node)
    return found


def _unsafe_call(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    unsafe = (
        called in _FORBIDDEN_CALLS
        or (called in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False")
        or (called == "torch.load" and keywords.get("weights_only") != "True")
        or keywords.get("allow_pickle", "False") != "False"
    )
    return [f"{node.lineno}: {called}({keywords})"] if unsafe else []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "import multiprocessing, shelve",
        "np.load('a')",
        "np.load('a', allow_pickle=True)",
        "np.savez('a', allow_pickle=True)",
        "torch.load('a')",
        "yaml.unsafe_load('a')",
        "yaml.load('a', Loader=yaml.UnsafeLoader)",
        "eval('1')",
    ],
)
def test_the_check_of_the_sources_can_fail(line):
    assert violations(ast.parse(line))


def test_no_code_here_can_unpickle_or_execute_what_it_reads():
    found = {str(path): violations(ast.parse(path.read_text())) for path in sources()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_yaml_loader_is_a_safe_one():
    from t0repro.tasks import template_files, templates

    for loader in (templates._loader(), template_files._Loader):
        assert issubclass(loader, yaml.constructor.SafeConstructor)
        tags = loader.yaml_constructors | loader.yaml_multi_constructors
        python = {tag: function for tag, function in tags.items() if "python" in str(tag)}
        # promptsource wrote some names as tuples, which are read as lists.
        python.pop("tag:yaml.org,2002:python/tuple", None)
        assert not python
        tuples = tags.get("tag:yaml.org,2002:python/tuple")
        assert tuples in (None, yaml.SafeLoader.construct_yaml_seq)


# ---- Hostile files on the paths of reading ------------------------------------------------------

_unpickled: list[str] = []
sys.addaudithook(
    lambda event, arguments: (
        _unpickled.append(arguments[1]) if event == "pickle.find_class" else None
    )
)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def payloads(mark: Path) -> dict[str, bytes]:
    """A bomb as a pickle, as an array of objects, as msgpack and as YAML."""
    import io

    array, archive = io.BytesIO(), io.BytesIO()
    objects = np.array([Bomb(mark)], object)
    np.save(array, objects, allow_pickle=True)
    np.savez(archive, objects)
    plain = pickle.dumps(Bomb(mark))
    return {
        "pickle": plain,
        "npy": array.getvalue(),
        "npz": archive.getvalue(),
        "msgpack": msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((1,), "object", plain)))}),
        "yaml": f"!!python/object/apply:os.mkdir ['{mark}']\n".encode(),
    }


@contextlib.contextmanager
def nothing_runs(mark: Path):
    """Checks that the block makes no bomb go off and unpickles nothing, whatever it raises."""
    _unpickled.clear()
    with contextlib.suppress(Exception):
        yield
    assert not mark.exists() and "mkdir" not in _unpickled


def test_the_check_of_reading_can_fail(tmp_path):
    mark = tmp_path / "mark"
    for name, load in (
        ("pickle", lambda path: pickle.loads(path.read_bytes())),
        ("npy", lambda path: np.load(path, allow_pickle=True)),
        ("yaml", lambda path: yaml.unsafe_load(path.read_text())),
    ):
        (tmp_path / name).write_bytes(payloads(mark)[name])
        with pytest.raises(AssertionError), nothing_runs(mark):
            load(tmp_path / name)
        mark.rmdir()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A tiny checkpoint in every format, by the format's name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    params = initial_parameters(T5(tiny_models.T5_1_1, tiny_models.FLOAT32), jax.random.key(0))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tree = {f"target/{path}": np.array(value) for path, value in flat.items()}
    save_tree(folder / "jax" / "checkpoint_7", {**tree, "state/step": np.int32(7)})
    for name in ("mtf", "hf", "t5x"):
        convert(folder / "jax", folder / name, name)
    return folder


def poisoned(folder: Path, to: Path, data: bytes):
    """Yields copies of a folder, in each of which another file is the data."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(folder, to)
        (to / path.relative_to(folder)).write_bytes(data)
        yield to


@pytest.mark.parametrize("name", ["jax", "mtf", "hf", "t5x"])
def test_no_file_of_a_checkpoint_is_executed(checkpoints, tmp_path, name):
    mark, count = tmp_path / "mark", 0
    for data in payloads(mark).values():
        for folder in poisoned(checkpoints / name, tmp_path / "copy", data):
            count += 1
            with nothing_runs(mark):
                load_any(str(folder))
            if name == "jax":  # as training reads it
                with nothing_runs(mark):
                    load_tree(folder / "checkpoint_7")
    assert count >= 10


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.ckpt.pt", "checkpoint.npy"])
def test_a_pickle_beside_a_configuration_is_not_read(checkpoints, tmp_path, file):
    for data in payloads(tmp_path / "mark").values():
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        (tmp_path / "hf").mkdir()
        shutil.copy(checkpoints / "hf" / "config.json", tmp_path / "hf")
        (tmp_path / "hf" / file).write_bytes(data)
        with nothing_runs(tmp_path / "mark"), pytest.raises(Exception, match="."):
            load_any(str(tmp_path / "hf"))


def test_no_file_of_an_evaluation_is_executed(tmp_path):
    mark = tmp_path / "mark"
    whole = write_scores(tmp_path / "whole", "a_task", [[-1.0, -2.0]], [0])
    for data in payloads(mark).values():
        for folder in poisoned(whole, tmp_path / "copy", data):
            with nothing_runs(mark):
                read_task_scores(folder)
        (tmp_path / "copy" / "report.json").write_bytes(data)
        with nothing_runs(mark):
            load_report(tmp_path / "copy")
        (tmp_path / "pairs.bin").write_bytes(data * 40)
        with (
            nothing_runs(mark),
            contextlib.closing(ScoreJournal(tmp_path / "pairs.bin")) as journal,
        ):
            journal.look_up(np.array([b"a"], DIGEST))
        (tmp_path / "arrays.npz").write_bytes(data)
        with nothing_runs(mark):
            load_batches(tmp_path / "arrays.npz")
        (tmp_path / "mine.yaml").write_bytes(data)
        with nothing_runs(mark):
            read_template_file(tmp_path / "mine.yaml")


def test_no_file_of_a_cache_is_executed(tmp_path, monkeypatch):
    import seqio

    import t0repro.tasks.demo  # noqa: F401
    from t0repro.data.checks import check_readable

    name, mark = "demo_synthetic_glue_mrpc_want_to_know", tmp_path / "mark"
    make(tmp_path / "whole", name, min_shards=1)
    task, count = seqio.TaskRegistry.get(name), 0
    lengths = {"inputs": 32, "targets": 8}
    for data in payloads(mark).values():
        for folder in poisoned(tmp_path / "whole" / name, tmp_path / "copy", data):
            count += 1
            monkeypatch.setattr(task, "_cache_dir", str(folder))
            with nothing_runs(mark):
                check_readable(name, "validation", use_cached=True)
            # As SeqIO reads it, which checks nothing first.
            with nothing_runs(mark):
                dataset = task.get_dataset(lengths, "validation", use_cached=True)
                list(dataset.as_numpy_iterator())
    # A whole record whose bytes are the bomb, so that no checksum saves the reader.
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "copy", dirs_exist_ok=True)
    (shard,) = (tmp_path / "copy").glob("validation.tfrecord-*")
    for data in payloads(mark).values():
        with tf.io.TFRecordWriter(str(shard)) as writer:
            writer.write(data)
        with nothing_runs(mark):
            list(read_records(shard))
        with nothing_runs(mark):
            list(task.get_dataset(lengths, "validation", use_cached=True).as_numpy_iterator())
    assert count >= 20
