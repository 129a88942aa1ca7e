"""Environments by task name, as callers of NeMo RL's functions have them: Ray actors, or plain objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kuberoll_workers.adapters.nemo_rl.actors import executor_for
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.runner import EnvironmentRunner


@asynccontextmanager
async def open_executors(
    task_to_env: Mapping[str, Any], tasks: Iterable[str], *, step_seconds: float, calls_in_flight: int = 1
) -> AsyncIterator[dict[str, Executor]]:
    """Open the executors of the tasks' environments; tasks that share an environment share its executor."""
    by_environment: dict[int, Executor] = {}
    executors: dict[str, Executor] = {}
    async with AsyncExitStack() as stack:
        for task in dict.fromkeys(tasks):
            environment = task_to_env[task]
            executor = by_environment.get(id(environment))
            if executor is None:
                # Results stay in this process, so metadata may be any objects.
                executor = executor_for(
                    environment, timeout=step_seconds, calls_in_flight=calls_in_flight, any_metadata=True
                )
                by_environment[id(environment)] = executor
                stack.push_async_callback(executor.close)
            executors[task] = executor
        yield executors


@asynccontextmanager
async def open_environments(
    task_to_env: Mapping[str, Any],
    tasks: Iterable[str],
    *,
    step_seconds: float,
    calls_in_flight: int = 1,
    max_batch: int,
) -> AsyncIterator[dict[str, EnvironmentRunner]]:
    """Open the tasks' environments for the loop; they are closed at the end, except Ray actors."""
    async with (
        open_executors(task_to_env, tasks, step_seconds=step_seconds, calls_in_flight=calls_in_flight) as executors,
        AsyncExitStack() as stack,
    ):
        runners = {}
        for task, executor in executors.items():
            runners[task] = EnvironmentRunner(executor, max_batch=max_batch)
            stack.push_async_callback(runners[task].close)
        yield runners
