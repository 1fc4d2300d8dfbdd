"""Lets the tests of this folder import its helpers, mesh_commands and tiny_tasks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
