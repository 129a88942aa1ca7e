"""A job over eight environments of three isolation kinds, two of which fail in some of their steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.environments import faulty
from tests.local.support import manifest

REPEATS = 4
ROWS = 24
HANG_SECONDS = 5
"""Time limit of a step where some hang; all others of that environment must end within it."""
NOTED = ("calm", "crashing", "hanging")


def mixed_job(directory: Path, *, faults: bool) -> Path:
    """The job's manifest, beside the module of its environments.

    Args:
        faults: A process crashes in the episode of every 50th step of one environment, and hangs in that of every 100th
            of another.
    """
    shutil.copy(faulty.__file__, directory / "faulty.py")

    def noted(name: str, **config: Any) -> dict[str, Any]:
        notes = directory / name
        notes.mkdir(exist_ok=True)
        return {
            "name": name,
            "entrypoint": "faulty:Faulty",
            "config": {"directory": str(notes), **(config if faults else {})},
            "access": {"writablePaths": [str(notes)]},
            "stepTimeoutSeconds": HANG_SECONDS if config.get("fault") == "hang" else 120,
        }

    environments: list[dict[str, Any]] = [
        {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 3}},
        {"name": "blackjack", "type": "blackjack"},
        {"name": "math", "type": "math"},
        {"name": "calculator", "type": "calculator", "config": {"maxCalls": 3}, "isolation": "Process"},
        {"name": "grid", "type": "grid_world", "config": {"maxMoves": 3}, "isolation": "Remote"},
        {**noted("calm"), "isolation": "Remote"},
        {**noted("crashing", fault="crash", every=50), "isolation": "Process", "processes": 2},
        {**noted("hanging", fault="hang", every=100), "isolation": "Process", "processes": 2},
    ]
    made = [environment["name"] for environment in environments if environment["name"] not in NOTED]
    sources = [
        {"name": "made", "source": {"generator": {"count": ROWS, "seed": 0, "environments": made}}},
        *(
            {"name": name, "environment": name, "source": {"rows": [{"prompt": f"Row {n}\n"} for n in range(ROWS)]}}
            for name in NOTED
        ),
    ]
    return manifest(
        directory / "job.yaml",
        environments=environments,
        dataset={"sources": sources, "shuffleSeed": 1, "repeats": REPEATS},
        rollout={"concurrency": 128, "maxFailedFraction": 0.1, "retries": {"environmentAttempts": 2}},
    )
