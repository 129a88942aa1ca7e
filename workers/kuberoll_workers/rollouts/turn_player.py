"""The player of KubeRoll's own loop: generate, step the environment, append its observation; turn by turn."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from kuberoll_workers.data.observations import ObservationTemplate, RawObservations
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.record import TurnRecord
from kuberoll_workers.data.thoughts import ThoughtsReader
from kuberoll_workers.data.tokenization import LONG_TEXT
from kuberoll_workers.data.tool_calls import message_fields, parse_tool_calls
from kuberoll_workers.environments.outcome import EnvironmentFault, EpisodeLost, StepInvalid, StepOutcome, StepTimedOut
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationResult, PolicyRefused, Silent
from kuberoll_workers.policy.responses import check_response
from kuberoll_workers.rollouts.attempts import StartOver
from kuberoll_workers.rollouts.call_limit import CallLimit, LimitedCall
from kuberoll_workers.rollouts.episodes import MAX_RECOVERIES, Episodes
from kuberoll_workers.rollouts.failures import TrajectoryFailed, failure_of, is_retryable
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.player import Barrier, Parts
from kuberoll_workers.rollouts.trajectory import Trajectory

_log = logging.getLogger(__name__)

TurnSink = Callable[[TurnRecord], Awaitable[None]]
"""Called with each complete turn after which its trajectory continues or waits for its group."""


class TurnPlayer:
    """Player of trajectories whose turns the loop makes itself."""

    scores_groups: ClassVar[bool] = True

    def __init__(
        self,
        parts: Parts,
        *,
        episodes: Episodes,
        observations: ObservationTemplate | None = None,
        turn_sink: TurnSink | None = None,
    ) -> None:
        """
        Args:
            observations: Converts an environment's message into tokens; None: the message is encoded as it is.
            turn_sink: Awaited with each complete turn after which its trajectory continues or waits for its group; an
                exception from it fails the trajectory.
        """
        self._settings = parts.settings
        self._policy = parts.policy
        self._generation = CallLimit(parts.settings.generation_seconds)
        self._environments = parts.environments
        self._tokenizer = parts.tokenizer
        self._attempts = parts.attempts
        self._episodes = episodes
        self._turn_sink = turn_sink
        self._observations = observations if observations is not None else RawObservations(parts.tokenizer)
        self._thoughts = ThoughtsReader(parts.tokenizer)
        # Whether answers to tool calls would be plain text, which is said once.
        self._plain_answers = isinstance(self._observations, RawObservations)

    async def play(self, flight: InFlight, barrier: Barrier | None = None) -> None:
        await self._begin(flight)
        responded = flight.trajectory.awaits_step
        while not flight.is_over:
            if not responded:
                await self._generate(flight)
            responded = False
            if barrier is not None:
                await barrier()
            await self._step(flight)
            if barrier is not None:
                await barrier()

    async def _begin(self, flight: InFlight) -> None:
        """Begin the episode of a trajectory, before its first turn.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        if flight.is_over:
            return

        await self._attempts.make(flight, "environment", lambda _: self._episodes.begin(flight))
        if not flight.trajectory.context:
            raise TrajectoryFailed(
                "the row has no messages, and the environment's reset added none: there is no prompt",
                reason="PromptMissing",
                stage="prompt",
            )

    async def _generate(self, flight: InFlight) -> None:
        """Generate the response of the next turn and append it.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        trajectory = flight.trajectory
        trajectory.check_prefix()
        prompt_tokens = len(trajectory.context)
        now = asyncio.get_running_loop().time
        started = now()
        flight.waiting_seconds = started - flight.waiting_since

        async def attempt(tries: int) -> GenerationResult:
            request = trajectory.next_request(tries)
            flight.session = request.session_id
            call = LimitedCall(self._generation)
            try:
                with call:
                    result = await self._policy.generate(request)
            except TimeoutError as error:
                if not call.expired:
                    raise
                seconds = self._generation.seconds
                raise Silent(f"no response within generationSeconds ({seconds:g} s)") from error
            free = self._settings.foreign_policy or not result.exact
            check_response(
                result,
                max_tokens=None if free else request.sampling.max_tokens,
                vocabulary=self._tokenizer.vocabulary,
            )
            if request.tools is not None and result.tool_calls is None:
                raise PolicyRefused(
                    "spec.generation.toolCallParser: the policy did not parse tool calls; its replicas are of an "
                    "older version, or were started without this parser"
                )
            return result

        operation = self._attempts.make(flight, "generation", attempt)
        flight.metrics.generating += 1
        try:
            result = await self._attempts.within_turn("generation", 0.0, operation)
        finally:
            flight.metrics.generating -= 1
        flight.waiting_since = ended = now()
        text = self._tokenizer.decode(result.token_ids)
        trajectory.add_response(result, text, ended - started, fields=self._reading(trajectory, result, text))
        flight.metrics.record_response(
            prompt=prompt_tokens, cached=result.cached_tokens, generated=len(result.token_ids)
        )

    def _reading(self, trajectory: Trajectory, result: GenerationResult, text: str) -> dict[str, Any]:
        """Fields of a response that say where its thoughts end and what it calls, if there is anything to say."""
        cut = result.finish_reason == "length"
        opened = self._thoughts.opened(trajectory.context, before=trajectory.thinks)
        fields: dict[str, Any] = dict(self._thoughts.fields(result.token_ids, text, opened=opened, cut=cut))
        if not trajectory.sample.prompt.tools:
            return fields
        calls = result.tool_calls
        if calls is None:
            # Not the message's text: tags may be special tokens.
            marked = self._tokenizer.decode_with_special_tokens(result.token_ids)
            thoughts = self._thoughts.end_in_marked(marked, opened=opened, cut=cut)
            calls = parse_tool_calls(marked, thoughts=thoughts, cut=cut)
        return {**fields, **message_fields(calls, trajectory.turn + 1)}

    async def _step(self, flight: InFlight) -> None:
        """Step the environment with the newest response and append its observation.

        A trajectory whose episode is lost may have to start over: then it has no turns after this.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        trajectory = flight.trajectory
        environment = self._environments[trajectory.task_name]
        now = asyncio.get_running_loop().time
        started = now()
        waited = flight.waiting_seconds + started - flight.waiting_since
        hung = False

        async def attempt(_: int) -> StepOutcome:
            nonlocal hung
            try:
                return await self._stepped(flight, environment, hung=hung)
            except StepTimedOut:
                hung = True
                raise

        operation = self._attempts.make(flight, "environment", attempt)
        flight.metrics.stepping += 1
        try:
            outcome = await self._attempts.within_turn("environment", trajectory.generation_seconds[-1], operation)
        except StartOver:
            await self._start_over(flight)
            return
        finally:
            flight.metrics.stepping -= 1
        flight.waiting_since = ended = now()
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
        if self._turn_sink is not None and (trajectory.stop_reason is None or flight.deferred):
            try:
                record = trajectory.turn_record()
                if flight.incidents.is_new:
                    record.incidents = flight.incidents.to_journal()
                await self._turn_sink(record)
            except OSError as error:
                cause = f"the turn could not be journaled: {error}"
                raise TrajectoryFailed(cause, reason="StorageFailed", stage="trajectory") from error

    async def _stepped(self, flight: InFlight, environment: EnvironmentRunner, *, hung: bool) -> StepOutcome:
        """One attempt of a step, with the recovery of its episode where that is lost.

        Raises:
            StartOver: The trajectory must start over.
        """
        trajectory = flight.trajectory
        while True:
            try:
                if flight.lost:
                    await self._episodes.recover(flight)
                    flight.lost = False
                return await environment.step(
                    trajectory.chat.copy(), trajectory.metadata, episode=flight.episode, hung=hung
                )
            except EpisodeLost as fault:
                flight.losses += 1
                flight.lost = True
                if flight.losses > MAX_RECOVERIES:
                    raise
                if environment.hooks.recovery == "restart":
                    flight.note_restart(fault.cause, str(fault), stage="environment")
                else:
                    flight.note_incident(fault.cause, str(fault), stage="environment", sequel="restored")
            except EnvironmentFault as fault:
                # The step may have changed the state of the episode before it failed.
                flight.lost = flight.episode is not None and environment.hooks.stateful
                if flight.lost and environment.hooks.recovery == "restart" and is_retryable(fault):
                    # A trajectory that starts over comes to the same turn again.
                    tries = flight.faults[trajectory.turn] = flight.faults.get(trajectory.turn, 0) + 1
                    exhausted = sum(flight.faults.values()) > MAX_RECOVERIES
                    if exhausted or tries >= self._attempts.most("environment"):
                        raise failure_of(fault, stage="environment", tries=tries) from fault
                    flight.metrics.record_retry("environment")
                    flight.note_restart(fault.cause, str(fault), stage="environment")
                    continue
                raise

    async def _start_over(self, flight: InFlight) -> None:
        async def attempt(_: int) -> None:
            await self._episodes.start_over(flight)
            flight.lost = False

        await self._attempts.make(flight, "environment", attempt)
        flight.waiting_since = asyncio.get_running_loop().time()

    async def _observed(self, trajectory: Trajectory, outcome: StepOutcome) -> array[int]:
        before, goes_on = trajectory.messages[-1].token_ids, trajectory.continues_after(outcome)
        if outcome.messages:
            if self._plain_answers and any("tool_call_id" in message for message in outcome.messages):
                self._plain_answers = False
                _log.warning(
                    "spec.rollout.observationTemplate is Raw: answers to tool calls are appended as they are, without "
                    "the role boundaries of the model's chat template; ChatTemplate adds them"
                )
            render = functools.partial(
                self._observations.render_messages, outcome.messages, previous=before, generation_prompt=goes_on
            )
            length = sum(len(message["content"]) for message in outcome.messages)
        else:
            render = functools.partial(
                self._observations.render, outcome.role, outcome.content, previous=before, generation_prompt=goes_on
            )
            length = len(outcome.content)
        try:
            return render() if length <= LONG_TEXT else await asyncio.to_thread(render)
        except Exception as error:
            cause = f"the environment's messages cannot be rendered: {message_of(error) or type(error).__name__}"
            raise TrajectoryFailed(cause, reason="MessagesRefused", stage="environment") from error
