"""Records in model_dir how a run was started, as t5's command does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from t0repro.config.configuration import Configuration
from t0repro.files import write_atomically
from t0repro.redaction import without_passwords


def record_command(configuration: Configuration) -> None:
    """Writes model_dir/commands/command[.N] and, when training, operative_config.gin."""
    model_dir = Path(configuration.inputs.model_dir)
    folder = model_dir / "commands"
    # As t5 names them: command, command.1, command.2.
    count = len(list(folder.glob("command*"))) if folder.is_dir() else 0
    command = without_passwords(shlex.join(sys.argv))
    write_atomically(folder / (f"command.{count}" if count else "command"), command)
    if configuration.inputs.mode == "train":
        write_atomically(model_dir / "operative_config.gin", configuration.gin_text)
