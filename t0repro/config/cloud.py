"""Refuses addresses at once if they could only fail minutes later, or would become local folders.

On a machine without credentials, TensorFlow looks for them over the network and retries. Nothing
here touches the network: credentials come from a file or from a Google Cloud machine.
"""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING

from t0repro.buckets import (
    check_credentials,
    check_readable,
    check_scheme,
    checked,
    is_address,
    read,
    scheme_of,
)
from t0repro.config.configuration import RunInputs
from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.files import check_address

if TYPE_CHECKING:
    from t0repro.config.gin_door import Bindings


def check_addresses(inputs: RunInputs, *, jax: bool) -> None:
    """Refuses gs:// addresses that cannot be read, before TensorFlow spends minutes trying.

    Raises:
      UserError: Without credentials, or for a model_dir that the stack cannot write to.
    """
    check_model_dir(inputs.model_dir, jax=jax)
    check_credentials(inputs.model_dir, "--model_dir")
    check_readable(inputs.init_checkpoint or "", "run.init_checkpoint")


def check_bound_addresses(bindings: Bindings) -> None:
    """Refuses gin bindings, in either dialect, that hold an address of an unknown scheme.

    Such an address would be mistaken for a local path. Credentials are not required: many of the
    addresses that files bind are never opened.

    Raises:
      UserError: With the place of the binding.
    """
    # Imported here, because runs started from Python check addresses too and must not import gin.
    from t0repro.config import gin_door

    for (scope, selector), arguments in gin_door.bound().items():
        for argument, value in arguments.items():
            for part in gin_door.parts_of(value):
                if isinstance(part, str) and "://" in part:
                    name = scope if selector == gin_door.MACRO else f"{selector}.{argument}"
                    place = bindings.place((scope, selector, argument))
                    check_scheme(part, place or name)


def check_model_dir(model_dir: str, *, jax: bool) -> None:
    """Refuses a model_dir that cannot be written to.

    Raises:
      UserError: For an address that cannot be opened; on Mesh TensorFlow, for any but TensorFlow's
        own gs://.
    """
    _check_output(model_dir, "--model_dir", jax=jax)


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
        if path is not None:
            _check_output(path, config.provenance.get(field, field), jax=jax)


def _check_output(path: str, where: str, *, jax: bool) -> None:
    scheme = scheme_of(path)
    if jax or scheme is None:
        check_address(path, where)
    elif scheme != "gs":
        raise UserError(
            f"{path} cannot be written to: TensorFlow writes to local paths and gs:// addresses.",
            where=where,
            fix="Give one of these, or --backend=jax.",
        )


def read_gin_from_buckets() -> None:
    """Makes gin read files at addresses, including `include`s, and refuse those out of reach."""
    from t0repro.config import gin_door

    readers = gin_door.file_readers()
    # Register once per process, however many command lines it parses.
    if (_opened, is_address) not in readers:
        # Insert first: gin tries its readers in order, and TensorFlow's may be among them.
        readers.insert(0, (_opened, is_address))


def _opened(path: str) -> IO[str]:
    where = "--gin_file, --gin_location_prefix, or an `include` line of a gin file"
    address = checked(path, where)
    try:
        return io.StringIO(read(address).decode())
    except FileNotFoundError as error:
        raise UserError(
            f"There is no gin file {address}.", where=where, fix="Correct the address."
        ) from error
