"""One turn of one trajectory, with its retries and time limits: the part that both schedulings share."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.tokenizer import Tokenizer
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationResult, Policy, PolicyUnavailable
from kuberoll_workers.rollouts.failures import Stage, TrajectoryFailed, backoff, failure_of
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory
from kuberoll_workers.telemetry import EnvironmentMetrics, RolloutMetrics

_Result = TypeVar("_Result")
_RETRIED = (PolicyUnavailable, EnvironmentFault)


class Rollout:
    """A policy, the environments and the settings: everything that a trajectory needs to be run."""

    def __init__(
        self,
        *,
        policy: Policy,
        environments: Mapping[str, EnvironmentRunner],
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
    ) -> None:
        """`environments` is keyed by task name."""
        self.settings = settings
        self._policy = policy
        self._environments = environments
        self._tokenizer = tokenizer
        self._metrics = metrics
        # Waits between retries only; nothing of a trajectory depends on it.
        self._draw = random.Random()

    def admit(self, sample: Sample) -> Flight:
        """Start one trajectory.

        Raises:
            KeyError: No environment has the sample's task name.
        """
        return Flight(self, Trajectory(sample, self.settings))

    async def generate(self, flight: Flight) -> None:
        """Generate the response of the next turn and append it.

        Raises:
            TrajectoryFailed: After the last try.
        """
        trajectory = flight.trajectory
        prompt_tokens = len(trajectory.context)
        started = time.perf_counter()

        async def attempt(tries: int) -> GenerationResult:
            request = trajectory.next_request(tries)
            limit = self.settings.generation_seconds
            try:
                async with asyncio.timeout(limit):
                    result = await self._policy.generate(request)
            except TimeoutError as error:
                raise PolicyUnavailable(f"no response within generationSeconds ({limit:g} s)") from error
            _check(result, None if self.settings.foreign_policy else request.sampling.max_tokens)
            return result

        with flight.metrics.generating.track_inprogress():
            result = await self._retrying(flight, "generation", self.settings.retries.generation_attempts, attempt)
        trajectory.add_response(result, self._tokenizer.decode(result.token_ids), time.perf_counter() - started)
        flight.metrics.generated(prompt=prompt_tokens, cached=result.cached_tokens, generated=len(result.token_ids))

    async def step(self, flight: Flight) -> None:
        """Step the environment over the newest response and append what it answered.

        Raises:
            TrajectoryFailed: After the last try.
        """
        trajectory = flight.trajectory
        environment = self._environments[trajectory.task_name]
        started = time.perf_counter()
        with flight.metrics.stepping.track_inprogress():
            outcome = await self._retrying(
                flight,
                "environment",
                self.settings.retries.environment_attempts,
                lambda _: environment.step(trajectory.chat.copy(), trajectory.metadata),
            )
        seconds = time.perf_counter() - started
        before = trajectory.environment_tokens
        trajectory.add_step(outcome, self._tokenizer.encode(outcome.content), seconds)
        flight.metrics.turn(
            trajectory.turn,
            generation_seconds=trajectory.generation_seconds[-1],
            environment_seconds=seconds,
            observed=trajectory.environment_tokens - before,
        )

    async def _retrying(
        self, flight: Flight, stage: Stage, attempts: int, operation: Callable[[int], Awaitable[_Result]]
    ) -> _Result:
        retries = self.settings.retries
        tries = 0
        while True:
            try:
                return await operation(tries)
            except Exception as error:
                tries += 1
                if tries >= attempts or not isinstance(error, _RETRIED):
                    raise failure_of(error, stage=stage, tries=tries) from error
            flight.metrics.retried(stage)
            await asyncio.sleep(
                backoff(tries, base=retries.backoff_seconds, longest=retries.max_backoff_seconds, draw=self._draw)
            )

    def metrics_of(self, task_name: str) -> EnvironmentMetrics:
        """The metrics of one environment."""
        if task_name not in self._environments:
            raise KeyError(f"no environment is named {task_name!r}; there are {', '.join(self._environments)}")
        return self._metrics.environment(task_name)


class Flight:
    """A trajectory under way, and when it has to be over."""

    __slots__ = ("deadline", "failure", "metrics", "rollout", "started", "trajectory")

    def __init__(self, rollout: Rollout, trajectory: Trajectory) -> None:
        self.rollout = rollout
        self.trajectory = trajectory
        self.metrics = rollout.metrics_of(trajectory.task_name)
        self.started = time.perf_counter()
        limit = rollout.settings.trajectory_seconds
        self.deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        self.failure: TrajectoryFailed | None = None

    @property
    def over(self) -> bool:
        return self.failure is not None or self.trajectory.ended is not None

    @contextlib.asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Turn whatever goes wrong inside into this trajectory's own failure, so that no other one notices."""
        timeout = asyncio.timeout_at(self.deadline)
        try:
            async with timeout:
                yield
        except TrajectoryFailed as failure:
            self.failure = failure
        except Exception as error:
            if timeout.expired():
                limit = self.rollout.settings.trajectory_seconds
                cause = f"the trajectory took longer than rollout.timeouts.trajectorySeconds ({limit:g} s)"
                self.failure = TrajectoryFailed(cause, kind="infrastructure", stage="trajectory", tries=1)
            else:
                self.failure = failure_of(error, stage="trajectory", tries=1)

    def result(self) -> TrajectoryRecord | FailureRecord:
        """The record of a trajectory that is over; counted in the metrics."""
        if self.failure is not None:
            self.metrics.failed(kind=self.failure.kind, stage=self.failure.stage)
            return self.trajectory.failure(self.failure)
        record = self.trajectory.record()
        self.metrics.finished(
            stop_reason=record.stop_reason,
            reward=record.total_reward,
            turns=record.turn_count,
            seconds=time.perf_counter() - self.started,
        )
        return record


def _check(result: GenerationResult, max_tokens: int | None) -> None:
    """Refuse a response that no trajectory may hold; the endpoint that made it is at fault.

    Args:
        max_tokens: What was asked for; None where the policy could not be told.

    Raises:
        PolicyUnavailable: Says what is wrong with it.
    """
    ids, logprobs = len(result.token_ids), len(result.logprobs)
    if ids != logprobs and (logprobs or max_tokens is not None):
        raise PolicyUnavailable(f"the response has {ids} token ids but {logprobs} logprobs")
    if not math.isfinite(sum(result.logprobs)):
        raise PolicyUnavailable("the response has a log-probability that is not a finite number")
    if max_tokens is not None and ids > max_tokens:
        raise PolicyUnavailable(f"the response has {ids} tokens, {max_tokens} were asked for")
    if result.finish_reason == "abort":
        raise PolicyUnavailable("the engine aborted the request")
