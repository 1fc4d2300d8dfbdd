"""What a run leaves in model_dir about itself, as t5_mesh_transformer does on either stack."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from t0repro.config.run_config import RunConfig
from t0repro.files import write_atomically


def record_command(config: RunConfig) -> None:
    """Writes commands/command[.N] and, when training, operative_config.gin."""
    import gin

    folder = Path(config.model_dir) / "commands"
    names = ["command", *(f"command.{count}" for count in range(1, 1 + _count(folder)))]
    write_atomically(folder / names[-1], shlex.join(sys.argv))
    if config.mode == "train":
        write_atomically(Path(config.model_dir) / "operative_config.gin", gin.config_str())


def _count(folder: Path) -> int:
    return len(list(folder.glob("command*"))) if folder.is_dir() else 0
