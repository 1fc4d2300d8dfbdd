"""What the console scripts call: Ctrl-C ends a command with a message from its first import on."""

from __future__ import annotations

import importlib
import sys


def t0repro() -> None:
    """Runs the command t0repro with the arguments in sys.argv and exits."""
    _run("t0repro", "app", "main")


def t5_mesh_transformer() -> None:
    """Runs the command t5_mesh_transformer with the arguments in sys.argv and exits."""
    _run("t5_mesh_transformer", "t5_mesh_transformer", "console_entry_point")


def _run(command: str, module: str, function: str) -> None:
    try:
        run = getattr(importlib.import_module(f"t0repro.cli.{module}"), function)
    except KeyboardInterrupt:  # later ones are the gate's, whose own import takes half of this time
        print(f"\n{command}: interrupted.\n  fix: Start the same command again.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as missing:  # of another Python than the one that setup.sh prepared
        print(
            f"{command}: {sys.executable} has no package {missing.name}.\n  fix: Use the"
            " environment: bash scripts/setup.sh makes it, source .venv/bin/activate enters it.",
            file=sys.stderr,
        )
        sys.exit(2)
    run()
