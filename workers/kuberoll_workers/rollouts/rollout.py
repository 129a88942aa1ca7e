"""Turns of one trajectory, with retries and time limits: the part that both schedulings share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from kuberoll_workers.data.observations import ObservationTemplate, RawObservations
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import DroppedRecord, DropReason, FailureRecord, TrajectoryRecord, TurnRecord
from kuberoll_workers.data.tokenizer import LONG_TEXT, Tokenizer
from kuberoll_workers.environments.isolation import is_cancelled
from kuberoll_workers.environments.outcome import StepInvalid, StepOutcome, StepTimedOut
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationResult, Policy, PolicyUnavailable
from kuberoll_workers.policy.routing.replica import SessionPolicy
from kuberoll_workers.rollouts.failures import Stage, TrajectoryFailed, backoff, failure_of, is_retryable
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import PrefixBroken, Trajectory
from kuberoll_workers.telemetry import EnvironmentMetrics, RolloutMetrics

_Result = TypeVar("_Result")

TurnSink = Callable[[TurnRecord], Awaitable[None]]
"""Called with each complete turn after which its trajectory continues or waits for its group."""


class Rollout:
    """The policy, environments and settings that trajectories run with."""

    def __init__(
        self,
        *,
        policy: Policy,
        environments: Mapping[str, EnvironmentRunner],
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
        observations: ObservationTemplate | None = None,
        turn_sink: TurnSink | None = None,
    ) -> None:
        """Set the parts of the loop.

        Args:
            environments: By task name.
            observations: Converts an environment's message into tokens; None: the message is encoded as it is.
            turn_sink: Awaited with each complete turn after which its trajectory continues or waits for its group; an
                exception from it fails the trajectory.
        """
        self.settings = settings
        self.turn_sink = turn_sink
        self._observations = observations if observations is not None else RawObservations(tokenizer)
        self._policy = policy
        self._environments = environments
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._sessions = policy if isinstance(policy, SessionPolicy) else None
        # For the jitter of backoff only; trajectories do not depend on it.
        self._draw = random.Random()

    def admit(self, sample: Sample, *, deferred: bool = False) -> InFlight:
        """Start one trajectory, or resume one that was interrupted.

        Args:
            deferred: Its record waits for its group, so that its last turn goes to `turn_sink` too.

        Raises:
            KeyError: No environment has the sample's task name.
            ValueError: The sample's partial does not fit it.
        """
        flight = InFlight(self, Trajectory(sample, self.settings), deferred=deferred)
        if flight.trajectory.turn:
            flight.metrics.record_resume(flight.trajectory.turn)
        return flight

    async def generate(self, flight: InFlight) -> None:
        """Generate the response of the next turn and append it.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        trajectory = flight.trajectory
        trajectory.check_prefix()
        prompt_tokens = len(trajectory.context)
        started = time.perf_counter()
        flight.waiting_seconds = started - flight.waiting_since

        async def attempt(tries: int) -> GenerationResult:
            request = trajectory.next_request(tries)
            flight.session = request.session_id
            limit = self.settings.generation_seconds
            timeout = asyncio.timeout(limit)
            try:
                async with timeout:
                    result = await self._policy.generate(request)
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise PolicyUnavailable(f"no response within generationSeconds ({limit:g} s)") from error
            free = self.settings.foreign_policy or not result.exact
            _check(result, None if free else request.sampling.max_tokens)
            return result

        operation = self._retrying(flight, "generation", self.settings.retries.generation_attempts, attempt)
        flight.metrics.generating += 1
        try:
            result = await self._within_turn("generation", 0.0, operation)
        finally:
            flight.metrics.generating -= 1
        flight.waiting_since = ended = time.perf_counter()
        trajectory.add_response(result, self._tokenizer.decode(result.token_ids), ended - started)
        flight.metrics.record_response(
            prompt=prompt_tokens, cached=result.cached_tokens, generated=len(result.token_ids)
        )

    async def step(self, flight: InFlight) -> None:
        """Step the environment with the newest response and append its observation.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        trajectory = flight.trajectory
        environment = self._environments[trajectory.task_name]
        started = time.perf_counter()
        waited = flight.waiting_seconds + started - flight.waiting_since
        hung = False

        async def attempt(_: int) -> StepOutcome:
            nonlocal hung
            try:
                return await environment.step(trajectory.chat.copy(), trajectory.metadata, hung=hung)
            except StepTimedOut:
                hung = True
                raise

        operation = self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
        flight.metrics.stepping += 1
        try:
            outcome = await self._within_turn("environment", trajectory.generation_seconds[-1], operation)
        finally:
            flight.metrics.stepping -= 1
        flight.waiting_since = ended = time.perf_counter()
        seconds, ended_at = ended - started, round(time.time(), 3)
        try:
            trajectory.check_step(outcome)
        except StepInvalid as fault:
            # A retry would not help: the sum includes the rewards of earlier turns.
            raise failure_of(fault, stage="environment", tries=1) from fault
        before = trajectory.environment_tokens
        observation = await self._observed(trajectory, outcome)
        trajectory.add_step(outcome, observation, seconds, ended_at=ended_at)
        flight.metrics.record_turn(
            trajectory.turn,
            waiting_seconds=waited,
            generation_seconds=trajectory.generation_seconds[-1],
            environment_seconds=seconds,
            observed=trajectory.environment_tokens - before,
        )
        if trajectory.stop_reason is not None:
            trajectory.check_tokens()
        if self.turn_sink is not None and (trajectory.stop_reason is None or flight.deferred):
            try:
                await self.turn_sink(trajectory.turn_record())
            except OSError as error:
                cause = f"the turn could not be journaled: {error}"
                raise TrajectoryFailed(cause, kind="infrastructure", stage="trajectory", tries=1) from error

    async def _observed(self, trajectory: Trajectory, outcome: StepOutcome) -> array[int]:
        render = functools.partial(
            self._observations.render,
            outcome.role,
            outcome.content,
            previous=trajectory.messages[-1].token_ids,
            generation_prompt=trajectory.continues_after(outcome),
        )
        return render() if len(outcome.content) <= LONG_TEXT else await asyncio.to_thread(render)

    async def play(self, flight: InFlight) -> None:
        """Run a trajectory until it finishes, fails or is stopped."""
        async with flight.guarded():
            while not flight.is_over:
                await self.generate(flight)
                await self.step(flight)

    def _within_turn(
        self, stage: Stage, used: float, operation: Coroutine[Any, Any, _Result]
    ) -> Coroutine[Any, Any, _Result]:
        limit = self.settings.turn_seconds
        return operation if limit is None else self._limited(stage, used, limit, operation)

    async def _limited(
        self, stage: Stage, used: float, limit: float, operation: Coroutine[Any, Any, _Result]
    ) -> _Result:
        timeout = asyncio.timeout(max(0.0, limit - used))
        try:
            async with timeout:
                return await operation
        except TimeoutError as error:
            if not timeout.expired():
                raise
            cause = f"the turn took longer than rollout.timeouts.turnSeconds ({limit:g} s)"
            raise TrajectoryFailed(cause, kind="infrastructure", stage=stage, tries=1) from error

    async def _retrying(
        self, flight: InFlight, stage: Stage, attempts: int, operation: Callable[[int], Awaitable[_Result]]
    ) -> _Result:
        retries = self.settings.retries
        tries = 0
        while True:
            try:
                return await operation(tries)
            except Exception as error:
                tries += 1
                if tries >= attempts or not is_retryable(error):
                    raise failure_of(error, stage=stage, tries=tries) from error
            flight.metrics.record_retry(stage)
            await asyncio.sleep(
                backoff(tries, base=retries.backoff_seconds, longest=retries.max_backoff_seconds, draw=self._draw)
            )

    def end_session(self, flight: InFlight) -> None:
        """Tell the policy that a trajectory sends no more requests."""
        if self._sessions is not None and flight.session is not None:
            self._sessions.end_session(flight.session)

    def flush_metrics(self) -> None:
        """Pass the counts so far to the metrics library."""
        self._metrics.flush()

    def metrics_of(self, task_name: str) -> EnvironmentMetrics:
        """The metrics of one environment.

        Raises:
            KeyError: There is no environment of that name.
        """
        if task_name not in self._environments:
            raise KeyError(f"no environment is named {task_name!r}; known ones are {', '.join(self._environments)}")
        return self._metrics.environment(task_name)


class InFlight:
    """A trajectory in flight, with its deadline and what ended it.

    Attributes:
        waiting_since: Start of its wait for the next generation or step, as `time.perf_counter` has it.
        waiting_seconds: Seconds that it waited before the generation of this turn.
        deferred: Its record waits for its group.
        deadline: Time of the event loop at which it fails; None: no limit.
        failure: Why it failed; None: it has not.
        drop_reason: Why it is dropped; None: it is not.
    """

    __slots__ = (
        "_timeout",
        "deadline",
        "deferred",
        "drop_reason",
        "failure",
        "metrics",
        "rollout",
        "session",
        "started",
        "trajectory",
        "waiting_seconds",
        "waiting_since",
    )

    def __init__(self, rollout: Rollout, trajectory: Trajectory, *, deferred: bool) -> None:
        self.rollout = rollout
        self.trajectory = trajectory
        self.deferred = deferred
        self.metrics = rollout.metrics_of(trajectory.task_name)
        self.started = self.waiting_since = time.perf_counter()
        self.waiting_seconds = 0.0
        limit = rollout.settings.trajectory_seconds
        self.session: str | None = None
        self.deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        self.failure: TrajectoryFailed | None = None
        self.drop_reason: DropReason | None = None
        self._timeout: asyncio.Timeout | None = None

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.drop_reason is not None or self.trajectory.stop_reason is not None

    def stop(self, reason: DropReason | TrajectoryFailed) -> None:
        """Stop it at once, cancelling what it waits for; does nothing if it has ended.

        Args:
            reason: Why it is dropped, or the failure of its group.
        """
        if self.is_over:
            return
        if isinstance(reason, TrajectoryFailed):
            self.failure = reason
        else:
            self.drop_reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Convert any error of the body into this trajectory's own failure, so that others are not affected."""
        self._timeout = timeout = asyncio.timeout_at(self.deadline)
        try:
            async with timeout:
                yield
        except TrajectoryFailed as failure:
            self._fail(failure)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # User code raised it; this task was not cancelled.
            self._fail(failure_of(error, stage="trajectory", tries=1))
        except PrefixBroken as error:
            self.metrics.record_prefix_violation()
            self._fail(TrajectoryFailed(str(error), kind="model", stage="trajectory", tries=1))
        except Exception as error:
            if timeout.expired():
                limit = self.rollout.settings.trajectory_seconds
                cause = f"the trajectory took longer than rollout.timeouts.trajectorySeconds ({limit or 0.0:g} s)"
                self._fail(TrajectoryFailed(cause, kind="infrastructure", stage="trajectory", tries=1))
            else:
                self._fail(failure_of(error, stage="trajectory", tries=1))
        finally:
            self._timeout = None
            self.rollout.end_session(self)

    def _fail(self, failure: TrajectoryFailed) -> None:
        # `stop` has recorded the reason already; an error caused by stopping is of no interest.
        if self.failure is None and self.drop_reason is None:
            self.failure = failure

    def result(self) -> TrajectoryRecord | FailureRecord | DroppedRecord:
        """The record of a trajectory that has ended."""
        if self.failure is not None:
            return self.trajectory.failure_record(self.failure)
        if self.drop_reason is not None:
            return self.trajectory.dropped_record(self.drop_reason)
        return self.trajectory.record()

    def count_result(self, result: TrajectoryRecord | FailureRecord | DroppedRecord) -> None:
        """Count the result in the metrics."""
        self.metrics.flush_if_due()
        if isinstance(result, FailureRecord):
            failure = self.failure
            assert failure is not None
            self.metrics.record_failure(kind=failure.kind, stage=failure.stage)
        elif isinstance(result, DroppedRecord):
            self.metrics.record_drop(reason=result.reason, tokens=result.tokens.generated)
        else:
            self.metrics.record_finish(
                stop_reason=result.stop_reason,
                reward=result.total_reward,
                turns=result.turn_count,
                seconds=time.perf_counter() - self.started,
            )


def _check(result: GenerationResult, max_tokens: int | None) -> None:
    """Reject a malformed response; the endpoint is at fault.

    Args:
        max_tokens: The requested maximum; None if the policy did not receive it.

    Raises:
        PolicyUnavailable: The response is malformed; the message says how.
    """
    ids, logprobs = len(result.token_ids), len(result.logprobs)
    if ids != logprobs and (logprobs or max_tokens is not None):
        raise PolicyUnavailable(f"the response has {ids} token ids but {logprobs} logprobs")
    if not math.isfinite(sum(result.logprobs)):
        raise PolicyUnavailable("the response has a log-probability that is not a finite number")
    if max_tokens is not None and ids > max_tokens:
        raise PolicyUnavailable(f"the response has {ids} tokens, more than the {max_tokens} that were requested")
    if result.finish_reason == "abort":
        raise PolicyUnavailable("the engine aborted the request")
