"""What a run leaves in model_dir about itself, as t5_mesh_transformer does on either stack."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from t0repro.config.configuration import Configuration
from t0repro.files import write_atomically


def record_command(configuration: Configuration) -> None:
    """Writes commands/command[.N] and, when training, operative_config.gin."""
    model_dir = Path(configuration.inputs.model_dir)
    folder = model_dir / "commands"
    count = len(list(folder.glob("command*"))) if folder.is_dir() else 0
    write_atomically(folder / (f"command.{count}" if count else "command"), shlex.join(sys.argv))
    if configuration.inputs.mode == "train":
        write_atomically(model_dir / "operative_config.gin", configuration.gin_text)
