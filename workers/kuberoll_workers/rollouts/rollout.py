"""A rollout: trajectories are admitted, played by the player of their environment, scored in groups, and ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kuberoll_workers.data.observations import ObservationTemplate
from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import Policy
from kuberoll_workers.policy.routing.replica import SessionPolicy
from kuberoll_workers.rollouts import group_scores
from kuberoll_workers.rollouts.attempts import Attempts
from kuberoll_workers.rollouts.episodes import Episodes
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.metrics import EnvironmentMetrics, RolloutMetrics
from kuberoll_workers.rollouts.player import Barrier, Parts, Player, PlayerFactory
from kuberoll_workers.rollouts.preparations import Preparations
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.turn_player import TurnPlayer, TurnSink


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
        players: Mapping[str, PlayerFactory] = MappingProxyType({}),
        jitter_seed: int | None = None,
    ) -> None:
        """Set the parts of the loop.

        Args:
            environments: By task name.
            observations, turn_sink: As in `TurnPlayer`.
            players: By task name, the players of environments whose trajectories are not played turn by turn.
            jitter_seed: As in `Attempts`.
        """
        self.settings = settings
        self._environments = environments
        self._metrics = metrics
        self._attempts = Attempts(settings, jitter_seed=jitter_seed)
        self._sessions = policy if isinstance(policy, SessionPolicy) else None
        self.episodes = Episodes(environments, tokenizer=tokenizer, settings=settings, journaled=turn_sink is not None)
        parts = Parts(
            policy=policy,
            environments=environments,
            tokenizer=tokenizer,
            settings=settings,
            attempts=self._attempts,
        )
        self._turn_player = TurnPlayer(parts, episodes=self.episodes, observations=observations, turn_sink=turn_sink)
        self._players: dict[str, Player] = {name: make(parts) for name, make in players.items()}

    def preparations(self) -> Preparations:
        """Preparations of a run's episodes."""
        return Preparations(self._environments, self.episodes.episode, concurrency=self.settings.concurrency)

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
        if sample.partial is not None and not sample.is_retry:
            # Else its failure says why it is played again.
            flight.note_interruption(sample.partial)
        return flight

    async def play(self, flight: InFlight, barrier: Barrier | None = None) -> None:
        """Run a trajectory until it finishes, fails or is stopped.

        Args:
            barrier: As in `Player.play`.
        """
        async with flight:
            await self._player(flight.trajectory.task_name).play(flight, barrier)

    def _player(self, task_name: str) -> Player:
        return self._players.get(task_name, self._turn_player)

    def may_score_groups(self, task_name: str) -> bool:
        """True if the environment scores prompt groups, or if that is not known yet."""
        if not self._player(task_name).scores_groups:
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

        await self._attempts.make(flight, "group", attempt)

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
