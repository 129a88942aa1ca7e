"""What Harbor's own runtime makes of tasks. Run by the Python that has it: trials on the input, results on the output.

Each is a line of JSON; results come as trials end.

Its argument is the number of trials at a time.

Harbor starts each machine with `docker compose`. Of its two images from a registry, the one that looks at the kernel
can be named by `HARBOR_PROBE_IMAGE`; the one of its egress proxy must be there under the name that it looks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Final

_SHOWN: Final = 1500


async def play(directory: Path, agent: str, trials: Path, name: str) -> dict[str, Any]:
    """One trial: its rewards by name or None, why it has none, and the seconds of its parts."""
    from harbor.models.trial.config import (  # type: ignore[import-not-found]
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
    )
    from harbor.trial.trial import Trial  # type: ignore[import-not-found]

    config = TrialConfig(
        task=TaskConfig(path=directory),
        trial_name=name,
        trials_dir=trials,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(type="docker", delete=True),
    )
    trial = await Trial.create(config)
    result = await trial.run()
    steps = result.step_results or []

    def seconds(part: Any) -> float | None:
        return (
            None if part is None or part.finished_at is None else (part.finished_at - part.started_at).total_seconds()
        )

    problems = [f"{one.exception_type}: {one.exception_message}"[:_SHOWN] for one in result.recorded_exceptions()]
    return {
        "rewards": None if result.verifier_result is None else result.verifier_result.rewards,
        "steps": [None if step.verifier_result is None else step.verifier_result.rewards for step in steps],
        "problems": problems,
        "start": seconds(result.environment_setup),
        "total": (result.finished_at - result.started_at).total_seconds(),
    }


async def answer(asked: dict[str, Any], number: int) -> dict[str, Any]:
    directory = Path(asked["directory"])
    # It becomes a project's name of docker compose.
    name = f"{directory.name}-{asked['agent']}-{os.getpid()}-{number}".replace(" ", "-")
    try:
        return await play(directory, asked["agent"], Path(asked["trials"]), name)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        return {"rewards": None, "steps": [], "problems": [problem[:_SHOWN]], "start": None, "total": None}


async def main(parallel: int) -> None:
    from harbor.environments.docker.docker import DockerEnvironment  # type: ignore[import-not-found]

    if image := os.environ.get("HARBOR_PROBE_IMAGE"):
        DockerEnvironment._EGRESS_CONTROL_KERNEL_PROBE_IMAGE = image
    places = asyncio.Semaphore(parallel)

    async def one(number: int, asked: dict[str, Any]) -> None:
        async with places:
            found = await answer(asked, number)
        print(json.dumps({**asked, **found}), flush=True)  # noqa: T201

    await asyncio.gather(*(one(number, json.loads(line)) for number, line in enumerate(sys.stdin)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 1))
