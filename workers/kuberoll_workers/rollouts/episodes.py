"""Episodes of trajectories: their beginning, their recovery when an environment's instance is gone, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kuberoll_workers.data.causes import Cause
from kuberoll_workers.data.messages import chat_message
from kuberoll_workers.data.prompts import Prompt, Sample, extended
from kuberoll_workers.data.tokenization import TemplateRefused, Tokenizer
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.environments.interface import ChatMessage, EndReason, Episode, EpisodeStart
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.attempts import StartOver
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory

MAX_RECOVERIES = 32
"""Maximum number of times that a trajectory's episode is lost through no fault of its own, or that it starts over."""


_MOST_NAMED = 10
_log = logging.getLogger(__name__)


class Episodes:
    """Episodes of the trajectories of a rollout."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentRunner],
        *,
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        journaled: bool,
    ) -> None:
        """`journaled`: complete turns are stored, so that an interrupted trajectory goes on after them."""
        self._environments = environments
        self._tokenizer = tokenizer
        self._settings = settings
        self._journaled = journaled
        self._started_over = 0

    def trajectory(self, sample: Sample) -> Trajectory:
        """The trajectory of a sample, with its stored turns.

        It starts over where what its tokens depend on is not what its turns were sampled under: its prompt would not
        be the one that they continue.

        Raises:
            ValueError: The sample's partial does not fit it.
        """
        if sample.partial is None:
            return Trajectory(sample, self._settings)
        first = sample.partial.turns[0]
        prompt = sample.prompt
        try:
            if first.prompt_messages or first.tools is not None:
                prompt = self._extended(prompt, first.prompt_messages or (), first.tools)
            trajectory = Trajectory(replace(sample, prompt=prompt), self._settings)
        except TrajectoryFailed as error:
            reason = str(error)
        else:
            if trajectory.turn or trajectory.stop_reason is not None:
                return trajectory
            reason = "its prompt, its sampling, or its model, tokenizer or chat template are not what they were"
        self._started_over += 1
        if self._started_over <= _MOST_NAMED:
            more = "; further ones are not named" if self._started_over == _MOST_NAMED else ""
            _log.warning(
                "trajectory %s starts over, without its %d stored turns: %s%s",
                tuple(sample.key), len(sample.partial.turns), reason, more,
            )  # fmt: skip
        return Trajectory(replace(sample, partial=None), self._settings)

    async def begin(self, flight: InFlight) -> None:
        """Begin a trajectory's episode, or restore that of an interrupted one. Does nothing without episodes.

        Raises:
            EnvironmentFault: The environment is at fault.
            TrajectoryFailed: The episode cannot be replayed.
        """
        environment = self._environments[flight.trajectory.task_name]
        hooks = await environment.find_hooks()
        flight.deferred = flight.deferred or hooks.score_group
        if not hooks.episodic:
            return
        sample = flight.sample
        # A failed attempt closes its episode: then its state is gone, unless the turns that are stored make it again.
        closes = hooks.close and hooks.recovery == "metadata"
        flight.restorable = hooks.recovery != "restart" and not closes
        if flight.trajectory.turn and (hooks.recovery == "restart" or (closes and sample.is_retry)):
            if not sample.is_retry:
                text = "the state of its episode was in an instance that is gone"
                flight.note_restart(Cause("Interrupted"), text, stage="environment")
            flight.trajectory = Trajectory(replace(sample, partial=None), self._settings)
        episode = self.episode(sample)
        flight.episode = episode.id
        if not flight.trajectory.turn:
            self._start(flight, await environment.begin(episode))
        elif hooks.recovery == "metadata":
            await environment.resume(episode)
        else:
            await self._replay(flight, await environment.begin(episode))
        if not flight.trajectory.turn:
            flight.metrics.record_episode()

    async def recover(self, flight: InFlight) -> None:
        """Restore the episode of a trajectory whose state is unknown.

        Raises:
            StartOver: The trajectory must start over; see `start_over`.
            EnvironmentFault: The environment is at fault.
            TrajectoryFailed: The episode cannot be replayed.
        """
        environment = self._environments[flight.trajectory.task_name]
        flight.metrics.record_recovery(environment.hooks.recovery)
        if environment.hooks.recovery == "restart":
            raise StartOver
        await self._replay(
            flight, await environment.begin_again(self.episode(flight.sample), flight.trajectory.metadata)
        )

    async def start_over(self, flight: InFlight) -> None:
        """Begin a trajectory again, from its prompt.

        Raises:
            EnvironmentFault: The environment is at fault.
        """
        environment = self._environments[flight.trajectory.task_name]
        start = await environment.begin_again(self.episode(flight.sample), flight.trajectory.metadata)
        flight.trajectory = Trajectory(replace(flight.sample, partial=None), self._settings)
        self._start(flight, start)

    def end(self, flight: InFlight, *, interrupted: bool) -> None:
        """End a trajectory's episode, if it has one; see `closed`.

        Args:
            interrupted: The run ends before the trajectory.
        """
        if flight.episode is None:
            return
        trajectory = flight.trajectory
        environment = self._environments[trajectory.task_name]
        if interrupted and self._journaled and trajectory.turn and environment.hooks.recovery == "metadata":
            environment.release(flight.episode)
        else:
            flight.closing = environment.end(
                flight.episode, trajectory.metadata, _reason(flight), flight.metrics.record_close
            )
        flight.episode = None

    async def closed(self, flight: InFlight) -> None:
        """Wait until the episode of an ended trajectory is closed.

        A trajectory is stored after that: one that is stored is not run again, so nobody else would close its episode.
        """
        if flight.closing is not None:
            await asyncio.shield(flight.closing)

    def _start(self, flight: InFlight, start: EpisodeStart) -> None:
        prompt = flight.sample.prompt
        if start.messages or start.tools is not None:
            prompt = self._extended(prompt, start.messages, start.tools)
        if start.metadata is not None:
            prompt = replace(prompt, metadata=start.metadata)
        if start.stop_strings is not None:
            prompt = replace(prompt, stop_strings=tuple(start.stop_strings))
        if prompt is not flight.sample.prompt:
            flight.trajectory = Trajectory(replace(flight.sample, prompt=prompt, partial=None), self._settings)

    def episode(self, sample: Sample) -> Episode:
        """The episode of a sample, as its environment is given it."""
        prompt = sample.prompt
        return Episode(
            id=sample.episode_id,
            messages=[chat_message(message) for message in prompt.messages],
            metadata=prompt.metadata,
            seed=prompt.seed,
            max_turns=self._settings.max_turns,
            tools=prompt.tools,
        )

    def _extended(self, prompt: Prompt, messages: Sequence[Mapping[str, str]], tools: Sequence[Tool] | None) -> Prompt:
        if not (prompt.messages or messages):
            return prompt
        try:
            return extended(prompt, self._tokenizer, messages=messages, tools=tools)
        except TemplateRefused as error:
            raise TrajectoryFailed(str(error), reason="MessagesRefused", stage="prompt") from error
        except Exception as error:
            cause = f"the model's chat template rejects the messages of the environment's reset: {error}"
            raise TrajectoryFailed(cause, reason="MessagesRefused", stage="prompt") from error

    async def _replay(self, flight: InFlight, start: EpisodeStart) -> None:
        """Step a new episode with the responses so far.

        Raises:
            EnvironmentFault: A step failed.
            TrajectoryFailed: The environment answered otherwise than before.
        """
        trajectory = flight.trajectory
        environment = self._environments[trajectory.task_name]
        added = trajectory.episode_messages()
        if [dict(message) for message in start.messages] != added:
            raise _not_repeatable("reset returned other messages than before")
        if start.tools is not None and list(start.tools) != list(trajectory.sample.prompt.tools or ()):
            raise _not_repeatable("reset declared other tools than before")
        metadata = start.metadata if start.metadata is not None else flight.sample.prompt.metadata
        for turn in range(trajectory.complete_turns):
            log: list[ChatMessage] = trajectory.chat[: trajectory.turn_messages(turn).start + 1]
            outcome = await environment.step(log, metadata, episode=flight.episode)
            if outcome.metadata is not None:
                metadata = outcome.metadata
            if difference := _difference(trajectory, turn, outcome):
                raise _not_repeatable(f"turn {turn + 1} now has {difference}")


def _difference(trajectory: Trajectory, turn: int, outcome: StepOutcome) -> str | None:
    """The first difference of a repeated step; None if there is none."""
    messages = trajectory.turn_messages(turn)
    if list(outcome.observation) != trajectory.chat[messages.start + 1 : messages.stop]:
        return "another observation"
    if outcome.reward != trajectory.rewards[turn]:
        return f"the reward {outcome.reward:g} instead of {trajectory.rewards[turn]:g}"
    return None


def _not_repeatable(difference: str) -> TrajectoryFailed:
    return TrajectoryFailed(
        f'the lost episode could not be replayed: {difference}. recovery = "replay" needs an environment that answers '
        'the same seed and responses with the same observations and rewards; recovery = "restart" does not',
        reason="NotRepeatable",
        stage="environment",
    )


def _reason(flight: InFlight) -> EndReason:
    if flight.failure is not None:
        return "failed"
    return flight.drop_reason or flight.trajectory.stop_reason or "interrupted"
