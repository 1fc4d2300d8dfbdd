"""The images: linted, and what they run is run here as a script, for no image is built."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HOME = "/opt/t0repro"


def instructions(file):
    """(instruction, its arguments) in order; lines that end in a backslash are joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", file.read_text())
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


@dataclasses.dataclass
class Container:
    """A folder of this machine in the place of an image's file system.

    Attributes:
      folder: stands for the image's WORKDIR.
      environment: what ARG and ENV have set so far.
      entry: the entry point.
    """

    folder: Path
    environment: dict
    entry: tuple = ()

    def build(self, file, **build_args):
        """Carries out the file's instructions, RUN by its own shell."""
        shell = ["/bin/sh", "-c"]
        for name, rest in instructions(file):
            if name == "ARG":
                variable, _, default = rest.partition("=")
                self.environment[variable] = build_args.get(variable, default.strip('"'))
            elif name == "ENV":
                for variable, value in re.findall(r"(\w+)=(\S+)", rest):
                    self.environment[variable] = self.expand(value)
            elif name == "SHELL":
                shell = json.loads(rest)
            elif name == "COPY":
                self.copy(rest.split())
            elif name == "RUN":
                done = self.run([*shell, rest])
                assert done.returncode == 0, done.stderr
            elif name == "ENTRYPOINT":
                self.entry = tuple(json.loads(rest))
            else:
                assert name in ("FROM", "WORKDIR"), name

    def expand(self, value):
        value = value.replace(HOME, str(self.folder))
        return re.sub(r"\$(\w+)", lambda found: self.environment.get(found[1], ""), value)

    def copy(self, words):
        *sources, target = words
        for source in sources:
            to = self.folder / target / (source if target == "./" else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(ROOT / source, to)

    def run(self, command):
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )

    def start(self, *arguments):
        """Runs the entry point, as `docker run IMAGE ARGUMENTS` does."""
        return self.run(
            [shutil.which(self.entry[0], path=self.environment["PATH"])]
            + [*self.entry[1:], *arguments]
        )


@pytest.fixture
def container(tmp_path):
    """An empty image of Python: this interpreter, and pip's configuration of this machine."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    python = str(Path(sys.base_prefix) / "bin")
    folder = tmp_path / "t0repro"
    folder.mkdir()
    return Container(
        folder, {**kept, "HOME": os.environ["HOME"], "PATH": f"{python}:/usr/bin:/bin"}
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_hadolint_finds_nothing(file):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs the extra docker: hadolint")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_copied_is_sent_to_the_builder(file):
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        word for name, rest in instructions(file) if name == "COPY" for word in rest.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.slow
def test_the_image_for_jax_is_built_and_checks_a_training(container):
    container.build(ROOT / "docker/jax.Dockerfile")
    # T5's own vocabulary, which these gin files name, is in a bucket.
    container.environment["T0REPRO_VOCAB"] = f"{container.folder}/tasks/demo/sentencepiece.model"
    done = container.start(
        "--run_mode=train",
        "--gin_file=t5x/examples/t5/t5_1_1/small.gin",
        "--gin_file=t5x/configs/runs/pretrain.gin",
        "--module_import=t0repro.tasks.demo",
        "--gin.MIXTURE_OR_TASK_NAME='demo_train'",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 16}",
        "--gin.TRAIN_STEPS=2",
        "--gin.DROPOUT_RATE=0.0",
        "--gin.MODEL_DIR='runs/a'",
        "--gin.USE_CACHED_TASKS=False",
        "--dry_run",
    )
    assert done.returncode == 0 and "demo_train" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_image_for_mesh_tensorflow_is_built_and_trains_a_step(container):
    container.build(ROOT / "docker/mesh_tensorflow.Dockerfile")
    done = container.start(
        f"--model_dir={container.folder}/model",
        "--module_import=t0repro.tasks.demo",
        "--gin_file=dataset.gin",
        "--gin_file=demo/t5.1.1.demo.gin",
        "--gin_param=MIXTURE_NAME = 'demo_train'",
        "--gin_param=utils.run.mesh_shape = []",
        "--gin_param=utils.run.train_steps = 1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (container.folder / "model" / "model.ckpt-1.index").exists()


@pytest.mark.slow
def test_an_unknown_accelerator_is_refused_before_anything_is_installed(container):
    with pytest.raises(AssertionError, match="ACCELERATOR is cpu, gpu or tpu"):
        container.build(ROOT / "docker/jax.Dockerfile", ACCELERATOR="abacus")
