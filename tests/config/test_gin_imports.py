"""What gin files import: listed without importing, and refused where it is not allowed."""

import dataclasses
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

import gin
from t0repro.config.gin import folders as gin_folders
from t0repro.config.gin import imports
from t0repro.config.gin.folders import is_shipped
from t0repro.config.mtf.parser import MeshInputs
from t0repro.config.mtf.parser import parse as parse_mesh
from t0repro.config.t5x import gin_files
from t0repro.errors import UserError

RUN = "include 't5x/examples/t5/t5_1_1/small.gin'\ninclude 't5x/configs/runs/pretrain.gin'\n"
SETTINGS = (
    "MODEL_DIR = 'a'",
    "MIXTURE_OR_TASK_NAME = 'b'",
    "TRAIN_STEPS = 10",
    "DROPOUT_RATE = 0.0",
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}",
)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder with a module that leaves a trace when imported, and files that import it."""
    module = tmp_path / "stranger_tasks.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "inner.gin").write_text("# of a stranger\nimport stranger_tasks\n")
    (tmp_path / "outer.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        f"include '{tmp_path / 'inner.gin'}'\nimport os.path as here\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("stranger_tasks", None)
    imports.restrict_imports(None)
    gin.clear_config()


def test_a_listing_follows_includes_and_imports_nothing(stranger):
    found = imports.list_imports(["outer.gin"], ["import a.b"], [str(stranger)], allowlist=["a"])
    assert [(line.module, line.allowed) for line in found] == [
        ("__gin__.dynamic_registration", True),
        ("stranger_tasks", False),
        ("os.path", False),
        ("a.b", True),
    ]
    assert found[1].place == f"{stranger / 'inner.gin'}:2"
    assert found[3].place == "the command line: 'import a.b'"
    assert not (stranger / "ran").exists() and "stranger_tasks" not in sys.modules


def test_a_listing_ends_at_a_missing_file_a_circle_and_what_is_no_gin(stranger):
    for text, what in (
        ("include 'nowhere.gin'", "no gin file nowhere.gin"),
        ("include 'loop.gin'", "include each other"),
        ("= = =", "not a gin statement"),
    ):
        (stranger / "loop.gin").write_text(f"{text}\n")
        with pytest.raises(UserError, match=what) as caught:
            imports.list_imports(["loop.gin"], [], [str(stranger)], None)
        assert "loop.gin" in str(caught.value.where) and caught.value.fix


def test_a_listing_has_the_modules_of_datasets_with_the_line_that_names_them(stranger):
    path = stranger / "run.gin"
    path.write_text(f"{RUN}infer_eval/utils.DatasetConfig.module = 'others'\n")
    folders = [str(gin_folders.shipped_files())]
    override = "MIXTURE_OR_TASK_MODULE = 'stranger_tasks'"
    found = imports.list_imports([str(path)], [override], folders, ["others"])
    modules = {line.module: (line.allowed, line.place) for line in found}
    assert modules["stranger_tasks"] == (False, f"the command line: {override!r}")
    assert modules["others"] == (True, f"{path}:3")
    assert not (stranger / "ran").exists()
    # Without a module, pretrain.gin's None names nothing.
    assert "stranger_tasks" not in [
        line.module for line in imports.list_imports([str(path)], [], folders, None)
    ]


def test_a_listing_finds_what_t5s_own_files_import():
    folders = gin_folders.mesh_folders(())
    found = imports.list_imports(["dataset.gin", "models/t5.1.1.small.gin"], [], folders, [])
    assert found and all(line.allowed for line in found)


@pytest.mark.parametrize("allowlist", [(), ("other",), ("stranger",)])
@pytest.mark.mtf
def test_mesh_tensorflows_parser_refuses_what_is_not_allowed(stranger, allowlist):
    inputs = MeshInputs("a", (str(stranger / "inner.gin"),), import_allowlist=allowlist)
    with pytest.raises(UserError, match="imports 'stranger_tasks'") as caught:
        parse_mesh(inputs)
    assert caught.value.where == f"{stranger / 'inner.gin'}:2"
    assert not (stranger / "ran").exists()


@pytest.mark.parametrize(
    "allowed",
    [{}, {"import_allowlist": ("stranger_tasks",)},
     {"import_allowlist": (), "module_imports": ("stranger_tasks",)}],
)  # fmt: skip
@pytest.mark.mtf
def test_mesh_tensorflows_parser_imports_what_is_allowed(stranger, allowed):
    files, params = (str(stranger / "inner.gin"), "dataset.gin"), ("MIXTURE_NAME = 'demo_train'",)
    modules = ("t0repro.tasks.demo", *allowed.pop("module_imports", ()))
    parse_mesh(MeshInputs("a", files, params, module_imports=modules, **allowed))
    assert (stranger / "ran").exists()


def test_t5xs_parser_refuses_what_is_not_allowed(stranger):
    (stranger / "run.gin").write_text(f"{RUN}import stranger_tasks\n")
    inputs = gin_files.T5xInputs("train", (str(stranger / "run.gin"),), SETTINGS)
    assert gin_files.parse(inputs).imports == ("stranger_tasks",)
    restricted = gin_files.T5xInputs(
        "train", inputs.gin_files, SETTINGS, import_allowlist=("t5.data",)
    )
    with pytest.raises(UserError, match="imports 'stranger_tasks'") as caught:
        gin_files.parse(restricted)
    assert caught.value.where == f"{stranger / 'run.gin'}:3"
    assert not (stranger / "ran").exists()


def test_the_module_of_a_dataset_is_an_import_too(stranger):
    path = stranger / "run.gin"
    path.write_text(f"{RUN}MIXTURE_OR_TASK_MODULE = 'stranger_tasks'\n")
    inputs = gin_files.T5xInputs("train", (str(path),), SETTINGS)
    assert gin_files.parse(inputs).imports == ("stranger_tasks",)
    with pytest.raises(UserError, match="imports 'stranger_tasks'") as caught:
        gin_files.parse(dataclasses.replace(inputs, import_allowlist=()))
    assert f"{path}:3" in str(caught.value.where) and not (stranger / "ran").exists()


def test_a_missing_module_is_named_with_the_module_that_imports_it(stranger):
    module = stranger / "stranger_network.py"
    module.write_text("# Their network.\nfrom not_installed.layers import Dense\n")
    path = stranger / "run.gin"
    # gin reads a name of their module while it parses the file.
    path.write_text(
        f"from __gin__ import dynamic_registration\n{RUN}"
        "import stranger_network\nMODEL = @stranger_network.Model()\n"
    )
    with pytest.raises(UserError) as caught:
        gin_files.parse(gin_files.T5xInputs("train", (str(path),), SETTINGS))
    assert caught.value.what == f"No module named 'not_installed', which {module}:2 imports."
    assert caught.value.where == f"{path}:5: MODEL = @stranger_network.Model()"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise ValueError('no rows')", "ValueError: no rows"),
        ("x = ", "SyntaxError: invalid syntax"),
        (
            "from t0repro.tasks.registration import add_mixture; add_mixture('m', {'nothing': 1})",
            "There is no task or mixture 'nothing'",
        ),
    ],
)
def test_an_error_in_a_users_module_has_the_modules_line(stranger, line, said):
    module = stranger / f"stranger_{said.split()[0].strip(':').lower()}.py"
    module.write_text(f"# Theirs.\n{line}\n")
    path = stranger / "run.gin"
    path.write_text(
        f"from __gin__ import dynamic_registration\n{RUN}"
        f"import {module.stem}\nMODEL = @{module.stem}.Model()\n"
    )
    with pytest.raises(UserError) as caught:
        gin_files.parse(gin_files.T5xInputs("train", (str(path),), SETTINGS))
    assert said in caught.value.what and f"{module}:2" in caught.value.where


def test_recorded_gin_files_are_those_of_mesh_tensorflow_and_t5():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts/dev/mtf_gin_files.py"))
    sources = {name: path for name, _, path in script["sources"]()}
    recorded = {str(path.relative_to(script["FOLDER"])) for path in script["FOLDER"].rglob("*.gin")}
    assert recorded == sources.keys()
    for name, path in sources.items():
        assert script["statements"](script["FOLDER"] / name) == script["statements"](path), name


def test_without_the_packages_their_recorded_files_are_read(monkeypatch):
    monkeypatch.setattr(gin_folders, "package_folder", lambda name: None)
    folders = gin_folders.mesh_folders(())
    files = [gin_folders.default_bindings(), "dataset.gin", "demo/t5.1.1.demo.gin"]
    found = imports.list_imports(files, [], folders, [])
    assert all(line.allowed for line in found)
    assert {line.place.rpartition(":")[0] for line in found} == {
        str(Path(folders[0], name)) for name in ("defaults.gin", "dataset.gin")
    }
    assert not gin_folders.has_module("t5", "models")
    assert all(is_shipped(line.place) for line in found)


def test_what_this_projects_gin_files_import_of_it_exists():
    lines = [
        (path.name, *found)
        for path in Path(__file__).parents[2].joinpath("gin").rglob("*.gin")
        for found in re.findall(
            r"^(?:from (t0repro[\w.]*) import (\w+)|import (t0repro[\w.]+))", path.read_text(), re.M
        )
    ]
    assert len(lines) > 5
    for file, package, name, whole in lines:
        module = whole or f"{package}.{name}"
        assert importlib.util.find_spec(module), f"{file} imports {module}"
