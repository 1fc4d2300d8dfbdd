"""SkyPilot: a task that starts several processes on machines of a cloud."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from t0repro.cloud.launchers.launch import (
    PORT,
    Launch,
    environment_of,
    limit_command_time,
    resource_name,
    run_command,
)


def start(launch: Launch, *, dry_run: bool) -> str:
    """Launches a task, or only shows it.

    Returns:
      What sky says, or the task.
    """
    task = json.dumps(sky_task(launch), indent=2)
    if dry_run:
        return task
    secrets = (f"--secret={variable}" for variable in launch.secrets)
    with tempfile.TemporaryDirectory() as folder:
        # sky recognizes a task file by its suffix.
        file = Path(folder, "task.yaml")
        file.write_text(task + "\n")
        words = ("sky", "launch", "--yes", "--detach-run", *launch.machine.options, *secrets)
        return run_command(*words, str(file), environment=launch.secrets)


def sky_task(launch: Launch) -> dict[str, Any]:
    """A task of SkyPilot's, one node for each process.

    The options for `sky launch` say which accelerators and which cloud. Secrets are named only:
    `sky launch` takes their values from its own environment.

    Raises:
      UserError: for a name without a letter, or a variable's that no shell takes.
    """
    variables = dict(environment_of(launch))
    limits = launch.limits
    resources = {
        name: f"{math.ceil(limit)}+"
        for name, limit in (("cpus", limits.cpus), ("memory", limits.memory_gb))
        if limit is not None
    }
    return {
        "name": resource_name(launch.name),
        "num_nodes": launch.processes,
        **({"resources": resources} if resources else {}),
        "envs": {name: text for name, text in variables.items() if name not in launch.secrets},
        # The nodes' addresses, one a line; the first one's is rank 0.
        "run": f"""\
export T0REPRO_COORDINATOR_ADDRESS=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}
export T0REPRO_PROCESS_COUNT=$SKYPILOT_NUM_NODES
export T0REPRO_PROCESS_INDEX=$SKYPILOT_NODE_RANK
{limit_command_time(launch)}
""",
    }
