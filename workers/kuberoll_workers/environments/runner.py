"""Runner of one environment: begins, steps and ends the episodes of the loop's trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kuberoll_workers.environments.batcher import Batcher
from kuberoll_workers.environments.batches import (
    CloseBatch,
    DiscardBatch,
    GroupBatch,
    PrepareBatch,
    ResetBatch,
    StepBatch,
    StepItem,
    TrialsBatch,
)
from kuberoll_workers.environments.executor import Executor, PreparingExecutor
from kuberoll_workers.environments.hooks import NO_HOOKS, Hooks
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EndReason,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
    Trials,
)
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome

CLOSE_SECONDS = 30.0
"""Time that episodes are given to close when the run ends."""

_log = logging.getLogger(__name__)


class _OpenEpisode:
    """An episode that was begun.

    Attributes:
        batcher: Calls of the instance that it was reset in, or of any instance.
        pending: Its newest call, which may go on after the trajectory has ended.
    """

    __slots__ = ("batcher", "episode", "pending")

    def __init__(self, episode: Episode, batcher: Batcher) -> None:
        self.episode = episode
        self.batcher = batcher
        self.pending: asyncio.Future[Any] | None = None

    async def call(self, call: Awaitable[Any]) -> Any:
        """Wait for a call; if the waiting is cancelled, the call goes on."""
        self.pending = pending = asyncio.ensure_future(call)
        return await asyncio.shield(pending)


class EnvironmentRunner:
    """Interface of one environment to the loop.

    An environment without hooks is only stepped. The episodes of a stateful one stay with the instance that reset them,
    each step in a call of its own: when a call fails, the state of its episode is unknown, and that of no other one.
    """

    def __init__(self, executor: Executor, *, max_batch: int) -> None:
        """`max_batch` is the maximum number of episodes in one call."""
        self._executor = executor
        self._batchers = [Batcher(executor, max_batch=max_batch)]
        self._hooks: Hooks | None = None
        self._starting = asyncio.Lock()
        self._open: dict[str, _OpenEpisode] = {}
        self._closing: set[asyncio.Future[Any]] = set()

    @property
    def hooks(self) -> Hooks:
        """Hooks of the environment; none before the first episode has begun."""
        return self._hooks or NO_HOOKS

    @property
    def known_hooks(self) -> Hooks | None:
        """Hooks of the environment; None before it was created."""
        return self._hooks

    async def find_hooks(self) -> Hooks:
        """Hooks of the environment, which is created if it is not there yet.

        Raises:
            EnvironmentFault: It could not be created.
        """
        if self._hooks is None:
            async with self._starting:
                if self._hooks is None:
                    hooks = await self._executor.hooks()
                    if hooks.stateful:
                        self._batchers = [Batcher(one, max_batch=1) for one in self._executor.instances()]
                    self._hooks = hooks
        return self._hooks

    async def find_preparation(self) -> Hooks | None:
        """Hooks of the environment, if it prepares episodes here; one that is not there yet is not created for that.

        Raises:
            EnvironmentFault: It could not be created.
        """
        if not (isinstance(self._executor, PreparingExecutor) and self._executor.prepares):
            return None
        hooks = await self.find_hooks()
        return hooks if hooks.prepare and not hooks.stateful and hooks.prepare_ahead != 0 else None

    def prepare(self, episode: Episode) -> None:
        """Have what an episode needs prepared, which begins later; `find_preparation` says whether that can be."""
        _log_fault(self._batchers[0].post(PrepareBatch, episode), f"episode {episode.id} could not be prepared")

    def discard(self, name: str) -> None:
        """Have what was prepared for an episode freed, unless it has used it."""
        freed = self._batchers[0].post(DiscardBatch, name)
        self._closing.add(freed)
        freed.add_done_callback(self._closing.discard)
        _log_fault(freed, f"what was prepared for episode {name} could not be freed")

    async def begin(self, episode: Episode) -> EpisodeStart:
        """Begin an episode. It is closed by `end`, and at once if it cannot be begun.

        Raises:
            EnvironmentFault: It could not be begun.
        """
        hooks = await self.find_hooks()
        opened = self._open[episode.id] = self._opened(episode)
        return await self._reset(opened, hooks, alone=False)

    async def resume(self, episode: Episode) -> None:
        """Take over an episode that another instance began, and that goes on from its metadata."""
        await self.find_hooks()
        self._open[episode.id] = self._opened(episode)

    async def begin_again(self, episode: Episode, metadata: Metadata) -> EpisodeStart:
        """Begin an episode again whose state is unknown, perhaps in another instance.

        Args:
            metadata: Its newest state.

        Raises:
            EnvironmentFault: It could not be begun; it is closed, and may be begun again.
        """
        # It is not open if it could not be begun the last time.
        if (opened := self._open.get(episode.id)) is not None:
            await self._close(opened, EpisodeEnd(id=episode.id, metadata=metadata, reason="lost"))
        opened = self._open[episode.id] = self._opened(episode)
        return await self._reset(opened, self.hooks, alone=True)

    async def step(
        self, log: list[ChatMessage], metadata: Metadata, *, episode: str | None = None, hung: bool = False
    ) -> StepOutcome:
        """Step one trajectory.

        Args:
            episode: Name of its episode, if it has been begun.
            hung: True if the same step timed out before.

        Raises:
            EnvironmentFault: This trajectory could not be stepped. Faults of other trajectories in the same batch never
                appear here.
        """
        opened = None if episode is None else self._open.get(episode)
        outcome: StepOutcome
        if opened is None:
            outcome = await self._batchers[0].call(StepBatch, StepItem(log, metadata), hung=hung)
        else:
            item = StepItem(log, metadata, episode if self.hooks.stateful else None)
            outcome = await opened.call(opened.batcher.call(StepBatch, item, hung=hung))
        return outcome.in_order_of_calls(log[-1]) if log else outcome

    async def step_batch(
        self, logs: Sequence[list[ChatMessage]], metadata: Sequence[Metadata]
    ) -> list[StepOutcome | BaseException]:
        """Step several trajectories; the result of a failed one is its fault."""
        steps = (self.step(log, state) for log, state in zip(logs, metadata, strict=True))
        return await asyncio.gather(*steps, return_exceptions=True)

    async def score_group(self, members: Sequence[GroupMember]) -> list[GroupScore]:
        """Score one complete prompt group; returns one score for each member.

        Raises:
            EnvironmentFault: It could not be scored.
        """
        scores: list[GroupScore] = await self._least_used().call(GroupBatch, members)
        return scores

    async def find_trials(self, episode: Episode) -> Trials:
        """Ask for right and wrong answers of an episode; there are none where the environment has no such methods.

        Args:
            episode: As `reset` has left it; it need not be open.

        Raises:
            EnvironmentFault: The environment could not be asked.
        """
        if not (await self.find_hooks()).trials:
            return Trials(solutions={}, attacks={})
        trials: Trials = await self._least_used().call(TrialsBatch, episode)
        return trials

    def end(
        self, name: str, metadata: Metadata, reason: EndReason, closed: Callable[[bool], None] | None = None
    ) -> asyncio.Future[None] | None:
        """End an episode.

        Args:
            closed: Called when `close` has returned: with False if it raised an exception.

        Returns:
            A future that completes when the episode is closed; None if it is not open.
        """
        opened = self._open.pop(name, None)
        if opened is None:
            return None
        end = EpisodeEnd(id=name, metadata=metadata, reason=reason)
        closing = asyncio.create_task(self._close(opened, end, closed))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    def release(self, name: str) -> None:
        """Forget an episode that another worker will resume from its metadata, without closing it."""
        self._open.pop(name, None)

    async def close(self) -> None:
        """Stop the environment; waiting calls are cancelled, after episodes have been given time to close."""
        for name, opened in list(self._open.items()):
            self.end(name, opened.episode.metadata, "interrupted")
        if self._closing:
            _, late = await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)
            for closing in late:
                closing.cancel()
        for batcher in self._batchers:
            await batcher.close()

    def _opened(self, episode: Episode) -> _OpenEpisode:
        return _OpenEpisode(episode, self._least_used())

    def _least_used(self) -> Batcher:
        used = Counter(opened.batcher for opened in self._open.values()) if len(self._batchers) > 1 else Counter()
        return min(self._batchers, key=lambda batcher: used[batcher])

    async def _reset(self, opened: _OpenEpisode, hooks: Hooks, *, alone: bool) -> EpisodeStart:
        episode = opened.episode
        if not (hooks.reset or hooks.stateful):
            return EpisodeStart()
        end = EpisodeEnd(id=episode.id, metadata=episode.metadata, reason="lost")
        try:
            start: EpisodeStart = await opened.call(opened.batcher.call(ResetBatch, episode, alone=alone))
            return start
        except EnvironmentFault:
            await self._close(opened, end)
            if alone:
                self._open.pop(episode.id, None)
                raise
        # Another episode of the batch may have been at fault.
        return await self._reset(opened, hooks, alone=True)

    async def _close(self, opened: _OpenEpisode, end: EpisodeEnd, closed: Callable[[bool], None] | None = None) -> None:
        if opened.pending is not None and not opened.pending.done():
            # Whoever waited for it has been stopped. The episode must not be closed before its last call has returned.
            await asyncio.wait((opened.pending,))
        end = _with_state(end, opened)
        done = True
        if self.hooks.close or self.hooks.stateful:
            try:
                await opened.batcher.call(CloseBatch, end)
            except EnvironmentFault as fault:
                done = False
                _log.warning("episode %s could not be closed: %s", end.id, fault)
        if closed is not None:
            closed(done)


def _log_fault(call: asyncio.Future[Any], message: str) -> None:
    def log(done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.warning("%s: %s", message, error)

    call.add_done_callback(log)


def _with_state(end: EpisodeEnd, opened: _OpenEpisode) -> EpisodeEnd:
    """The end with the state that the reset returned, if it was the episode's last call: maybe nobody waited for it."""
    if opened.pending is not None and opened.pending.done() and not opened.pending.cancelled():
        with contextlib.suppress(EnvironmentFault):
            result = opened.pending.result()
            if isinstance(result, EpisodeStart) and result.metadata is not None:
                return dataclasses.replace(end, metadata=result.metadata)
    return end
