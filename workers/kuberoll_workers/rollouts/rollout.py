"""Turns of one trajectory, with retries and time limits: the part that both schedulings share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from kuberoll_workers.data.messages import chat_message, token_array
from kuberoll_workers.data.observations import ObservationTemplate, RawObservations
from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import TurnRecord
from kuberoll_workers.data.thoughts import ThoughtsReader
from kuberoll_workers.data.tokenizer import LONG_TEXT, Tokenizer
from kuberoll_workers.data.tool_calls import message_fields, parse_tool_calls
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    EpisodeLost,
    StepInvalid,
    StepOutcome,
    StepTimedOut,
)
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.agent_sessions import AgentPolicy, AgentSession, ClosedSession
from kuberoll_workers.policy.interface import (
    GenerationResult,
    Policy,
    PolicyRefused,
    PolicyUnavailable,
    UnknownTokens,
)
from kuberoll_workers.policy.responses import check_ids, check_response
from kuberoll_workers.policy.routing.replica import SessionPolicy
from kuberoll_workers.rollouts import group_scores
from kuberoll_workers.rollouts.agents import (
    AgentSettings,
    NothingSampled,
    agent_request,
    agent_trajectory,
    record_agent,
    session_settings,
)
from kuberoll_workers.rollouts.episodes import MAX_RECOVERIES, Episodes, StartOver
from kuberoll_workers.rollouts.failures import Stage, TrajectoryFailed, backoff, failure_of, is_retryable
from kuberoll_workers.rollouts.gym_agents import gym_request, gym_trajectory
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory
from kuberoll_workers.telemetry import EnvironmentMetrics, RolloutMetrics

_log = logging.getLogger(__name__)
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
        agents: Mapping[str, AgentSettings] = MappingProxyType({}),
        jitter_seed: int | None = None,
    ) -> None:
        """Set the parts of the loop.

        Args:
            environments: By task name.
            observations: Converts an environment's message into tokens; None: the message is encoded as it is.
            turn_sink: Awaited with each complete turn after which its trajectory continues or waits for its group; an
                exception from it fails the trajectory.
            agents: By task name, the environments that are agents.
            jitter_seed: Seed of the jitter of backoff; None: random.
        """
        self._agents = agents
        self.settings = settings
        self.turn_sink = turn_sink
        self._observations = observations if observations is not None else RawObservations(tokenizer)
        self._policy = policy
        self._environments = environments
        self._tokenizer = tokenizer
        self._thoughts = ThoughtsReader(tokenizer)
        self._metrics = metrics
        self._sessions = policy if isinstance(policy, SessionPolicy) else None
        # Whether answers to tool calls would be plain text, which is said once.
        self._plain_answers = isinstance(self._observations, RawObservations)
        # Sessions of agents that are being closed.
        self._closing: set[asyncio.Future[None]] = set()
        # For the jitter of backoff only; trajectories do not depend on it.
        self._draw = random.Random(jitter_seed)
        self.episodes = Episodes(environments, tokenizer=tokenizer, settings=settings, journaled=turn_sink is not None)

    def admit(self, sample: Sample, *, deferred: bool = False) -> InFlight:
        """Start one trajectory, or resume one that was interrupted.

        Args:
            deferred: Its record waits for its group, so that its last turn goes to `turn_sink` too.

        Raises:
            KeyError: No environment has the sample's task name.
            ValueError: The sample's partial does not fit it.
        """
        flight = InFlight(
            sample,
            self.episodes.trajectory(sample),
            metrics=self.metrics_of(sample.prompt.task_name),
            seconds=self.settings.trajectory_seconds,
            deferred=deferred,
            ended=self._end,
        )
        if flight.trajectory.turn:
            flight.metrics.record_resume(flight.trajectory.turn)
        return flight

    async def begin(self, flight: InFlight) -> None:
        """Begin the episode of a trajectory, before its first turn.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        if flight.is_over:
            return

        async def attempt(_: int) -> None:
            await self.episodes.begin(flight)

        await self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
        if not flight.trajectory.context:
            raise TrajectoryFailed(
                "the row has no messages, and the environment's reset added none: there is no prompt",
                kind="data",
                stage="prompt",
                tries=1,
            )

    async def generate(self, flight: InFlight) -> None:
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

        operation = self._retrying(flight, "generation", self.settings.retries.generation_attempts, attempt)
        flight.metrics.generating += 1
        try:
            result = await self._within_turn("generation", 0.0, operation)
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

    async def step(self, flight: InFlight) -> None:
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

        operation = self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
        flight.metrics.stepping += 1
        try:
            outcome = await self._within_turn("environment", trajectory.generation_seconds[-1], operation)
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
        if self.turn_sink is not None and (trajectory.stop_reason is None or flight.deferred):
            try:
                await self.turn_sink(trajectory.turn_record())
            except OSError as error:
                cause = f"the turn could not be journaled: {error}"
                raise TrajectoryFailed(cause, kind="infrastructure", stage="trajectory", tries=1) from error

    async def _stepped(self, flight: InFlight, environment: EnvironmentRunner, *, hung: bool) -> StepOutcome:
        """One attempt of a step, with the recovery of its episode where that is lost.

        Raises:
            StartOver: The trajectory must start over.
        """
        trajectory = flight.trajectory
        while True:
            try:
                if flight.lost:
                    await self.episodes.recover(flight)
                    flight.lost = False
                return await environment.step(
                    trajectory.chat.copy(), trajectory.metadata, episode=flight.episode, hung=hung
                )
            except EpisodeLost:
                flight.losses += 1
                flight.lost = True
                if flight.losses > MAX_RECOVERIES:
                    raise
            except EnvironmentFault as fault:
                # The step may have changed the state of the episode before it failed.
                flight.lost = flight.episode is not None and environment.hooks.stateful
                if flight.lost and environment.hooks.recovery == "restart" and is_retryable(fault):
                    # A trajectory that starts over comes to the same turn again.
                    tries = flight.faults[trajectory.turn] = flight.faults.get(trajectory.turn, 0) + 1
                    exhausted = sum(flight.faults.values()) > MAX_RECOVERIES
                    if exhausted or tries >= self.settings.retries.environment_attempts:
                        raise failure_of(fault, stage="environment", tries=tries) from fault
                    flight.metrics.record_retry("environment")
                    continue
                raise

    async def _start_over(self, flight: InFlight) -> None:
        async def attempt(_: int) -> None:
            await self.episodes.start_over(flight)
            flight.lost = False

        await self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
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
        return render() if length <= LONG_TEXT else await asyncio.to_thread(render)

    async def play(self, flight: InFlight) -> None:
        """Run a trajectory until it finishes, fails or is stopped."""
        async with flight:
            if (agent := self._agents.get(flight.trajectory.task_name)) is not None:
                await (self._play_agent(flight, agent) if agent.sessions else self._play_gym_agent(flight))
                return
            await self.begin(flight)
            while not flight.is_over:
                await self.generate(flight)
                await self.step(flight)

    async def _play_agent(self, flight: InFlight, agent: AgentSettings) -> None:
        """Run an agent to its end, in a session of its own for each attempt.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        policy = self._policy
        if not isinstance(policy, AgentPolicy):
            raise TrajectoryFailed(
                "agents need a policy with sessions, which this one has not", kind="data", stage="generation", tries=1
            )
        sample = flight.sample
        environment = self._environments[sample.prompt.task_name]
        settings = session_settings(sample, self.settings, seconds=agent.seconds)

        name = flight.session = f"{sample.prompt.task_index}-{sample.rollout_index}-{sample.attempt}"

        async def open_session(_: int) -> AgentSession:
            return await policy.open_session(name, settings)

        async def attempt(_: int) -> None:
            while (lost := await play_once()) is not None:
                # With its replica or its server, through no fault of the agent.
                flight.losses += 1
                if flight.losses > MAX_RECOVERIES:
                    raise lost
                flight.metrics.record_recovery("restart")

        async def play_once() -> PolicyUnavailable | EpisodeLost | None:
            session = await self._retrying(
                flight, "generation", self.settings.retries.generation_attempts, open_session
            )
            flight.metrics.stepping += 1
            began = time.monotonic()
            try:
                messages = [chat_message(message) for message in sample.prompt.messages]
                async with policy.attend_session(session):
                    outcome = await environment.step(messages, agent_request(sample, session))
            except PolicyUnavailable as lost:
                return lost
            except EpisodeLost as lost:
                # The agent may go on where nobody reaches it: never in the session of the next one.
                self._close_later(policy, session)
                return lost
            except EnvironmentFault as fault:
                try:
                    closed = await policy.close_session(session)
                except PolicyUnavailable as error:
                    return PolicyUnavailable(f"{error}; the agent says: {fault}")
                if closed.aborted:
                    return PolicyUnavailable(f"{_aborted(closed)}; the agent says: {fault}")
                # What it has done so far is in the record of its failure.
                with contextlib.suppress(NothingSampled):
                    await played(closed, None, 0.0)
                raise
            except BaseException:
                # Stopped from outside: nobody waits for what was sampled.
                self._close_later(policy, session)
                raise
            finally:
                flight.metrics.stepping -= 1
            try:
                closed = await policy.close_session(session)
            except PolicyUnavailable as error:
                return error
            if closed.aborted:
                # Whatever it made of the missing answer, an episode without that is another one.
                return PolicyUnavailable(_aborted(closed))
            await played(closed, outcome, time.monotonic() - began)
            return None

        async def played(closed: ClosedSession, outcome: StepOutcome | None, seconds: float) -> None:
            flight.metrics.record_calls(closed.continuity)
            decode = self._tokenizer.decode
            flight.trajectory = await asyncio.to_thread(
                agent_trajectory, sample, self.settings, closed, outcome, decode, seconds=seconds
            )
            record_agent(flight.metrics, flight.trajectory)
            self._check_agent(flight.trajectory)

        await self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
        flight.trajectory.check_tokens()

    async def _play_gym_agent(self, flight: InFlight) -> None:
        """Have an agent server of NeMo Gym roll a sample out.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        sample = flight.sample
        environment = self._environments[sample.prompt.task_name]
        messages = [chat_message(message) for message in sample.prompt.messages]
        request = gym_request(sample, self.settings)

        async def attempt(tries: int) -> None:
            began = time.time()
            flight.metrics.stepping += 1
            try:
                outcome = await environment.step(messages, request)
            finally:
                flight.metrics.stepping -= 1
            convert = functools.partial(
                gym_trajectory,
                row=request["row"],
                began=began,
                ended=time.time(),
                decode=lambda ids: self._tokenizer.decode(token_array(ids)),
            )
            try:
                flight.trajectory = await asyncio.to_thread(convert, sample, self.settings, outcome)
            except EnvironmentFault as fault:
                # The server has answered, and would answer in the same form again.
                raise failure_of(fault, stage="environment", tries=tries + 1) from fault
            self._check_agent(flight.trajectory)

        await self._retrying(flight, "environment", self.settings.retries.environment_attempts, attempt)
        flight.trajectory.check_tokens()
        flight.metrics.record_calls(flight.trajectory.continuity or {})
        record_agent(flight.metrics, flight.trajectory)

    def _close_later(self, policy: AgentPolicy, session: AgentSession) -> None:
        closing = asyncio.ensure_future(_closed(policy, session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def may_score_groups(self, task_name: str) -> bool:
        """True if the environment scores prompt groups, or if that is not known yet."""
        if task_name in self._agents:
            return False
        hooks = self._environments[task_name].known_hooks
        return hooks is None or hooks.score_group

    async def score_group(self, group: SampleGroup, flights: Sequence[InFlight]) -> None:
        """Score a complete prompt group, if its environment does that; see `InFlight.result`.

        Args:
            flights: Its finished trajectories, which have no record yet.

        Raises:
            TrajectoryFailed: After the last attempt.
        """
        flight = flights[0]
        environment = self._environments[flight.trajectory.task_name]

        async def attempt(_: int) -> None:
            if (await environment.find_hooks()).score_group:
                await group_scores.score(environment, group, [flight.trajectory for flight in flights])

        await self._retrying(flight, "group", self.settings.retries.environment_attempts, attempt)

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

    def _check_agent(self, trajectory: Trajectory) -> None:
        """Check what was sampled in an agent's session.

        Raises:
            TrajectoryFailed: It has ids that are no tokens.
        """
        branches = [message for branch in trajectory.branches or () for message in branch.messages]
        try:
            for message in (*trajectory.messages, *branches):
                if message.sampled:
                    check_ids(token_array(message.token_ids), self._tokenizer.vocabulary)
        except UnknownTokens as error:
            raise failure_of(error, stage="generation", tries=1) from error

    async def _retrying(
        self, flight: InFlight, stage: Stage, attempts: int, operation: Callable[[int], Awaitable[_Result]]
    ) -> _Result:
        retries = self.settings.retries
        tries = 0
        while True:
            try:
                return await operation(tries)
            except (StartOver, TrajectoryFailed):
                raise
            except Exception as error:
                tries += 1
                if tries >= attempts or not is_retryable(error):
                    raise failure_of(error, stage=stage, tries=tries) from error
            flight.metrics.record_retry(stage)
            await asyncio.sleep(
                backoff(tries, base=retries.backoff_seconds, longest=retries.max_backoff_seconds, draw=self._draw)
            )

    def _end(self, flight: InFlight, interrupted: bool) -> None:
        """End the session of a trajectory that sends no more requests, and its episode."""
        if self._sessions is not None and flight.session is not None:
            self._sessions.end_session(flight.session)
        self.episodes.end(flight, interrupted=interrupted)

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


def _aborted(closed: ClosedSession) -> str:
    return f"the engine failed in the middle of {closed.aborted} of the responses, and the agent did not ask again"


async def _closed(policy: AgentPolicy, session: AgentSession) -> None:
    with contextlib.suppress(PolicyUnavailable):
        await policy.close_session(session)
