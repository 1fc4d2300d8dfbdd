"""Maps T0's own names for the module that registers its tasks to the module that does so here."""

from __future__ import annotations

import sys
from collections.abc import Iterable

_ALIASES = {
    "t0.seqio_tasks": "t0repro.tasks.t0",
    "promptsource.seqio_tasks": "t0repro.tasks.t0",  # an earlier name; it downloads on import
}


def resolved(modules: Iterable[str]) -> list[str]:
    """The modules, with T0's names replaced by this project's; each change is noted on stderr."""
    found = []
    for module in modules:
        name = _ALIASES.get(module, module)
        if name != module:
            print(f"--module_import={module}: {name} registers T0's tasks here.", file=sys.stderr)
        found.append(name)
    return found
