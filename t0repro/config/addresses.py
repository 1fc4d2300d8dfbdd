"""Addresses of a Mesh TensorFlow run that are refused before anything opens them.

Otherwise they could only fail minutes later, or would become local folders: on a machine without
credentials, TensorFlow looks for them over the network and retries. Nothing here touches the
network: credentials come from a file or from a Google Cloud machine.
"""

from __future__ import annotations

from t0repro import storage
from t0repro.config import table
from t0repro.config.configuration import RunInputs
from t0repro.config.run import Run
from t0repro.errors import UserError
from t0repro.storage import access, check_address


def check_addresses(inputs: RunInputs, *, jax: bool) -> None:
    """Refuses gs:// addresses that cannot be read, before TensorFlow spends minutes trying.

    Raises:
      UserError: Without credentials, or for a model_dir that the stack cannot write to.
    """
    check_output(inputs.model_dir, "--model_dir", jax=jax)
    access.check_credentials(inputs.model_dir, "--model_dir")
    storage.check_readable(inputs.init_checkpoint or "", "run.init_checkpoint")


def check_outputs(config: Run, *, jax: bool = True) -> None:
    """Refuses gin bindings that would write to an address; see `check_output`.

    Raises:
      UserError: For an address, with the place of its binding.
    """
    for field, value in table.flatten(config):
        if value and field in ("eval_summary_dir", "scores_filename", "text.output_filename"):
            check_output(value, config.provenance.get(field, field), jax=jax)


def check_output(path: str, where: str, *, jax: bool) -> None:
    """Refuses a path that cannot be written to.

    Args:
      path: A path or an address.
      where: The option or the binding that gives it.
      jax: Whether the JAX stack writes there; Mesh TensorFlow takes no address but gs://.

    Raises:
      UserError: For an address that cannot be opened, or that the stack cannot write to.
    """
    scheme = storage.scheme_of(path)
    if jax or scheme is None:
        check_address(path, where)
    elif scheme != "gs":
        raise UserError(
            f"{path} cannot be written to: TensorFlow writes to local paths and gs:// addresses.",
            where=where,
            fix="Give one of these, or --backend=jax.",
        )
