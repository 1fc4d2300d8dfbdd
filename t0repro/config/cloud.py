"""Refuses addresses at once if they could only fail, minutes later.

On a machine without credentials, TensorFlow looks for them over the network and retries. Nothing
here touches the network: credentials are a file, or belong to a machine of Google's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from t0repro.config.configuration import RunInputs
from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.files import output_path, scheme_of

_MACHINE = Path("/sys/class/dmi/id/product_name")  # the machine's name in its firmware


def check_address(path: str | None, where: str | None) -> None:
    """Raises UserError for a gs:// address on a machine without credentials.

    Args:
      path: A path or address; anything but gs:// passes.
      where: The flag or binding that names it.
    """
    if path is None or not path.startswith("gs://") or has_credentials():
        return
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    reason = f"GOOGLE_APPLICATION_CREDENTIALS is {named}, which is not a file. " if named else ""
    raise UserError(
        # Said here, since TensorFlow would first retry for minutes and then name no cause.
        f"{path} cannot be read: this machine has no Google Cloud credentials. {reason}".strip(),
        where=where,
        fix="Run `gcloud auth application-default login`, or copy it here with"
        f" `gcloud storage cp -r {path.rstrip('/')} .` and give the copy's path.",
    )


def check_addresses(inputs: RunInputs, *, jax: bool) -> None:
    """Refuses gs:// addresses that cannot be read, before TensorFlow spends minutes trying.

    Raises:
      UserError: Without credentials, or for a model_dir that the stack cannot write to.
    """
    check_model_dir(inputs.model_dir, jax=jax)
    check_address(inputs.model_dir, "--model_dir")
    check_address(inputs.init_checkpoint, "run.init_checkpoint")


def check_model_dir(model_dir: str, *, jax: bool) -> None:
    """Refuses a model_dir that cannot be written to: the JAX stack writes to local folders only.

    Raises:
      UserError: For an address; on Mesh TensorFlow, for any but TensorFlow's own gs://.
    """
    if jax or scheme_of(model_dir) != "gs":
        output_path(model_dir, "--model_dir")


def check_outputs(config: RunConfig, *, jax: bool = True) -> None:
    """Refuses gin bindings that would write to an address; see `check_model_dir`.

    Raises:
      UserError: For an address, with the place of its binding.
    """
    bound = {
        "eval_summary_dir": config.eval_summary_dir,
        "scores_filename": config.scores_filename,
        "output_filename": config.infer and config.infer.output_filename,
    }
    for field, path in bound.items():
        if path is not None and (jax or scheme_of(path) != "gs"):
            output_path(path, config.provenance.get(field, field))


def has_credentials() -> bool:
    """Whether there is a credentials file, or this is one of Google's machines."""
    # Names a metadata server, which is where Google's machines get their credentials.
    if "GCE_METADATA_HOST" in os.environ:
        return True
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    files = [
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"),
        Path(folder) / "application_default_credentials.json",
    ]
    if any(file and Path(file).is_file() for file in files):
        return True
    try:
        return "Google" in _MACHINE.read_text()
    except OSError:
        return False


def guard_gin() -> None:
    """Makes gin refuse files at gs:// addresses that it cannot read, including `include`s."""
    from t0repro.config import gin_door

    readers = gin_door.file_readers()
    # Registered once in a process, however many command lines are parsed in it.
    if (_refuse, _is_out_of_reach) not in readers:
        # First, since gin tries its readers in order and TensorFlow's may be among them.
        readers.insert(0, (_refuse, _is_out_of_reach))


def _is_out_of_reach(path: str) -> bool:
    return path.startswith("gs://") and not has_credentials()


def _refuse(path: str) -> IO[Any]:
    check_address(path, "--gin_file, --gin_location_prefix, or an `include` line of a gin file")
    raise AssertionError("an address that cannot be reached is refused")
