"""Preparations: what episodes need that begin next is got ready while others run, so that no place waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kuberoll_api.ahead import usual_ahead
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.environments.interface import Episode
from kuberoll_workers.environments.runner import EnvironmentRunner


class Preparations:
    """Episodes that environments prepare: each is used by its own trajectory, or freed.

    An episode is prepared only while its trajectory is among the next ones that may begin. As they begin in the same
    order as without preparations, these are those that do.

    Attributes:
        active: An environment prepares episodes; else nobody need tell what begins and ends.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentRunner],
        episode: Callable[[Sample], Episode],
        *,
        concurrency: int,
    ) -> None:
        """
        Args:
            environments: By task name.
            episode: The episode of a sample.
            concurrency: Number of places of trajectories.
        """
        self._environments = environments
        self._episode = episode
        self._concurrency = concurrency
        self.active = False
        # Of the environments that prepare episodes; empty until they are found.
        self._most: dict[str, int] = {}
        # Runners of the episodes that are prepared, by the episode's name: before their beginning, and after it.
        self._waiting: dict[str, EnvironmentRunner] = {}
        self._begun: dict[str, EnvironmentRunner] = {}

    async def find(self) -> int:
        """Find out how many of the next trajectories are to be looked at; 0: no environment prepares any.

        Raises:
            EnvironmentFault: An environment could not be created.
        """
        for name, environment in self._environments.items():
            hooks = await environment.find_preparation()
            if hooks is not None:
                most = hooks.prepare_ahead
                self._most[name] = usual_ahead(self._concurrency) if most is None else most
        reach = max(self._most.values(), default=0)
        self.active = reach > 0
        return reach

    @property
    def names(self) -> frozenset[str]:
        """Names of the episodes that are prepared and have not begun."""
        return frozenset(self._waiting)

    def update(self, upcoming: Sequence[Sample]) -> None:
        """Prepare the first of the trajectories that begin next, and free what was prepared for others."""
        wanted = self._selected(upcoming)
        for name in [name for name in self._waiting if name not in wanted]:
            self._waiting.pop(name).discard(name)
        for name, sample in wanted.items():
            if name not in self._waiting:
                environment = self._environments[sample.prompt.task_name]
                environment.prepare(self._episode(sample))
                self._waiting[name] = environment

    def begin(self, sample: Sample) -> None:
        """Note that a trajectory begins, which uses what was prepared for it."""
        if (environment := self._waiting.pop(sample.episode_id, None)) is not None:
            self._begun[sample.episode_id] = environment

    def end(self, sample: Sample) -> None:
        """Free what was prepared for a trajectory that has ended, if it did not come to use it."""
        if (environment := self._begun.pop(sample.episode_id, None)) is not None:
            environment.discard(sample.episode_id)

    def _selected(self, upcoming: Sequence[Sample]) -> dict[str, Sample]:
        found: dict[str, Sample] = {}
        left = dict(self._most)
        for sample in upcoming:
            # One that goes on after its stored turns may need nothing any more.
            if sample.partial is None and left.get(sample.prompt.task_name, 0) > 0:
                left[sample.prompt.task_name] -= 1
                found[sample.episode_id] = sample
        return found
