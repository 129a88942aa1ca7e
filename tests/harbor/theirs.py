"""What Harbor reads in tasks. Run by the Python that has it: directories on the input, a line of JSON for each."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any


def read(directory: Path) -> dict[str, Any]:
    """Values of a task, by names of our own.

    Raises:
        Exception: Harbor refuses it.
    """
    from harbor.environments.definition import (  # type: ignore[import-not-found]
        require_agent_environment_definition,
        should_upload_environment_dir,
    )
    from harbor.models.task.artifacts import normalize_artifact_entries  # type: ignore[import-not-found]
    from harbor.models.task.task import Task  # type: ignore[import-not-found]
    from harbor.models.task.verifier_mode import (  # type: ignore[import-not-found]
        resolve_step_verifier_mode,
        resolve_task_verifier_mode,
        resolve_verifier_environment_definition,
    )
    from harbor.models.trial.config import (  # type: ignore[import-not-found]
        AgentConfig,
        EnvironmentConfig,
        VerifierConfig,
    )
    from harbor.trial.network_policy import resolve_trial_network_plan  # type: ignore[import-not-found]

    task = Task(directory)
    if not Task.is_valid_dir(directory):
        raise ValueError("no valid directory")
    config, paths = task.config, task.paths
    require_agent_environment_definition(paths.environment_dir, docker_image=config.environment.docker_image)

    def network(policy: Any) -> dict[str, Any]:
        return {"mode": policy.network_mode.value, "hosts": policy.allowed_hosts}

    def check(found: Any) -> dict[str, Any] | None:
        return None if found is None else found.model_dump()

    def machine(environment: Any, folder: Path, *, uploads: bool) -> dict[str, Any]:
        built = not environment.docker_image
        uploaded = uploads and should_upload_environment_dir(folder, docker_image=environment.docker_image)
        fields = environment.model_dump(include={"cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "env"})
        return {
            **fields,
            "image": environment.docker_image or None,
            "context": str(folder.relative_to(directory)) if built else None,
            "upload": bool(uploaded),
            "start": environment.build_timeout_sec,
            "workdir": environment.workdir or None,
            "skills": environment.skills_dir or None,
            "network": network(environment.resolve_baseline()),
            "healthcheck": check(environment.healthcheck),
            "servers": [server.model_dump() for server in environment.mcp_servers],
        }

    def stage(step: Any) -> dict[str, Any]:
        mode = resolve_task_verifier_mode(config) if step is None else resolve_step_verifier_mode(config, step)
        plan = resolve_trial_network_plan(
            config, AgentConfig(), EnvironmentConfig(), VerifierConfig(), step, verifier_mode=mode
        )
        own = resolve_verifier_environment_definition(config, paths, step)
        agent, verifier = (config.agent, config.verifier) if step is None else (step.agent, step.verifier)
        seconds = agent.timeout_sec if agent.timeout_sec is not None else config.agent.timeout_sec
        artifacts = [*config.artifacts, *([] if step is None else step.artifacts)]
        hooks = [*config.verifier.collect, *([] if step is None else verifier.collect)]
        return {
            "name": None if step is None else step.name,
            "instruction": task.instruction if step is None else task.step_instruction(step.name),
            "timeout": seconds,
            "user": agent.user if agent.user is not None else config.agent.user,
            "network": network(plan.agent_phase),
            "verifier": None if own is None else machine(own.config, own.directory, uploads=not own.bundled_tests),
            "bundled": own is not None and own.bundled_tests,
            "verifier_timeout": verifier.timeout_sec,
            "verifier_user": verifier.user if verifier.user is not None else config.verifier.user,
            "verifier_env": {**config.verifier.env, **verifier.env},
            "verifier_network": network(plan.verifier_phase),
            "collect": [hook.model_dump(exclude={"service"}) for hook in hooks],
            "healthcheck": None if step is None else check(step.healthcheck),
            "least": None if step is None else step.min_reward,
            "artifacts": [
                one.model_dump(include={"source", "destination", "exclude"})
                for one in normalize_artifact_entries(artifacts)
            ],
        }

    strategy = config.multi_step_reward_strategy
    return {
        "name": task.name,
        "schema": config.schema_version,
        "machine": machine(config.environment, paths.environment_dir, uploads=True),
        "stages": [stage(step) for step in config.steps or [None]],
        "strategy": "mean" if strategy is None else strategy.value,
        "solution": config.solution.env,
    }


def rewards(text: str | None, json_text: str | None, folder: Path) -> dict[str, float] | None:
    """Harbor's rewards of two files; None if it refuses them."""
    from harbor.models.trial.paths import TrialPaths  # type: ignore[import-not-found]
    from harbor.models.verifier.result import VerifierResult  # type: ignore[import-not-found]
    from harbor.verifier.verifier import Verifier  # type: ignore[import-not-found]

    paths = TrialPaths(folder)
    paths.verifier_dir.mkdir(parents=True, exist_ok=True)
    for file, content in ((paths.reward_text_path, text), (paths.reward_json_path, json_text)):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
    verifier = Verifier.__new__(Verifier)
    verifier.trial_paths = paths
    try:
        if json_text is not None:
            found = VerifierResult(rewards=verifier._parse_reward_json()).rewards
        elif text is not None:
            found = VerifierResult(rewards=verifier._parse_reward_text()).rewards
        else:
            return None
    except Exception:
        return None
    return {name: float(value) for name, value in found.items()}


def combined(steps: list[dict[str, float] | None], strategy: str | None) -> dict[str, float] | None:
    """Harbor's rewards of a task of steps."""
    from types import SimpleNamespace as Space

    from harbor.models.task.config import MultiStepRewardStrategy  # type: ignore[import-not-found]
    from harbor.models.verifier.result import VerifierResult
    from harbor.trial.trial import Trial  # type: ignore[import-not-found]

    chosen = None if strategy is None else MultiStepRewardStrategy(strategy)
    results = [Space(verifier_result=None if one is None else VerifierResult(rewards=one)) for one in steps]
    trial = Space(task=Space(config=Space(multi_step_reward_strategy=chosen)), result=Space(step_results=results))
    trial._aggregate_step_rewards = lambda: Trial._aggregate_step_rewards(trial)
    found = Trial._select_multi_step_reward(trial)
    return None if found is None else found.rewards


def answer(question: dict[str, Any]) -> Any:
    if "directory" in question:
        try:
            return {"values": read(Path(question["directory"]))}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"[:500]}
    if "steps" in question:
        return combined(question["steps"], question["strategy"])
    try:
        return rewards(question["text"], question["json"], Path(question["folder"]))
    except OverflowError:
        return {"reward": math.inf}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)  # noqa: T201
