"""Batches: the arguments of one call of an environment, for several episodes.

An environment in this process is called with copies: what it changes in place changes nothing that is stored, sent to
the policy or given to another call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from kuberoll_workers.data.plain import own_copy
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
    Trials,
)
from kuberoll_workers.environments.outcome import EnvironmentFault, Outcomes, split_return, split_scores, split_starts
from kuberoll_workers.environments.trials import split_trials

_Result = TypeVar("_Result", covariant=True)


class Batch(Protocol[_Result]):
    """The arguments of one call.

    Attributes:
        method: Name of the environment's method.
        shared: True if several episodes may be in one call.
    """

    method: ClassVar[str]
    shared: ClassVar[bool]

    @classmethod
    def of(cls, items: Sequence[Any]) -> Self:
        """The batch of some episodes' arguments."""
        ...

    def __len__(self) -> int: ...

    def invoke(self, environment: Any) -> Any:
        """Call the environment; the result may be an awaitable."""
        ...

    def split(self, returned: Any) -> Sequence[_Result | EnvironmentFault]:
        """Validate what the environment returned and split it by episode; runs code of the environment's objects.

        Raises:
            StepInvalid: No episode has a valid result.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepItem:
    """One trajectory's step.

    Attributes:
        log: The messages up to the policy's newest one.
        metadata: The episode's state.
        episode: Name of the episode; None if the environment has none.
    """

    log: list[ChatMessage]
    metadata: Metadata
    episode: str | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Steps.

    Attributes:
        any_metadata: Metadata may be any objects and is passed as it is: it is neither stored nor sent.
    """

    method: ClassVar[str] = "step"
    shared: ClassVar[bool] = True

    items: Sequence[StepItem]
    any_metadata: bool = False

    @classmethod
    def of(cls, items: Sequence[StepItem]) -> Self:
        return cls(items)

    @classmethod
    def of_columns(cls, logs: Sequence[list[ChatMessage]], metadata: Sequence[Metadata]) -> Self:
        """The batch of some logs and states, in the same order."""
        return cls([StepItem(log, state) for log, state in zip(logs, metadata, strict=True)])

    def __len__(self) -> int:
        return len(self.items)

    def invoke(self, environment: Any) -> Any:
        return environment.step(*self.arguments())

    def arguments(self) -> tuple[list[list[ChatMessage]], list[Metadata]]:
        """Arguments of `step`: what it changes in place must not reach the trajectory's own messages and state."""
        return [own_messages(item.log) for item in self.items], [
            item.metadata if self.any_metadata else own_copy(item.metadata) for item in self.items
        ]

    def split(self, returned: Any) -> Outcomes:
        return split_return(returned, len(self.items), any_metadata=self.any_metadata)


@dataclass(frozen=True, slots=True)
class ResetBatch:
    """Beginnings of episodes."""

    method: ClassVar[str] = "reset"
    shared: ClassVar[bool] = True

    episodes: Sequence[Episode]

    @classmethod
    def of(cls, items: Sequence[Episode]) -> Self:
        return cls(items)

    def __len__(self) -> int:
        return len(self.episodes)

    def invoke(self, environment: Any) -> Any:
        # A class that only names its `recovery` need not have it.
        reset = getattr(environment, "reset", None)
        if reset is None:
            return [None] * len(self.episodes)
        return reset(list(map(_own_episode, self.episodes)))

    def split(self, returned: Any) -> list[EpisodeStart | EnvironmentFault]:
        return split_starts(returned, len(self.episodes))


@dataclass(frozen=True, slots=True)
class PrepareBatch:
    """Episodes that will begin."""

    method: ClassVar[str] = "prepare"
    shared: ClassVar[bool] = False

    episodes: Sequence[Episode]

    @classmethod
    def of(cls, items: Sequence[Episode]) -> Self:
        return cls(items)

    def __len__(self) -> int:
        return len(self.episodes)

    def invoke(self, environment: Any) -> Any:
        return environment.prepare([_own_episode(episode) for episode in self.episodes])

    def split(self, returned: Any) -> list[EnvironmentFault | None]:  # noqa: ARG002 - nothing is expected
        return [None] * len(self.episodes)


@dataclass(frozen=True, slots=True)
class DiscardBatch:
    """Names of episodes that were prepared, and do not begin or have ended."""

    method: ClassVar[str] = "discard"
    shared: ClassVar[bool] = False

    names: Sequence[str]

    @classmethod
    def of(cls, items: Sequence[str]) -> Self:
        return cls(items)

    def __len__(self) -> int:
        return len(self.names)

    def invoke(self, environment: Any) -> Any:
        return environment.discard(list(self.names))

    def split(self, returned: Any) -> list[EnvironmentFault | None]:  # noqa: ARG002 - nothing is expected
        return [None] * len(self.names)


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """Ends of episodes."""

    method: ClassVar[str] = "close"
    # One that raises must not keep another episode from its one close.
    shared: ClassVar[bool] = False

    ends: Sequence[EpisodeEnd]

    @classmethod
    def of(cls, items: Sequence[EpisodeEnd]) -> Self:
        return cls(items)

    def __len__(self) -> int:
        return len(self.ends)

    def invoke(self, environment: Any) -> Any:
        close = getattr(environment, "close", None)
        return None if close is None else close([replace(end, metadata=own_copy(end.metadata)) for end in self.ends])

    def split(self, returned: Any) -> list[EnvironmentFault | None]:  # noqa: ARG002 - nothing is expected
        return [None] * len(self.ends)


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One complete prompt group."""

    method: ClassVar[str] = "score_group"
    # A call is one group: when it fails, no other group is hit.
    shared: ClassVar[bool] = False

    members: Sequence[GroupMember]

    @classmethod
    def of(cls, items: Sequence[Sequence[GroupMember]]) -> Self:
        (members,) = items
        return cls(members)

    def __len__(self) -> int:
        return 1

    def invoke(self, environment: Any) -> Any:
        return environment.score_group(
            [
                replace(member, messages=own_messages(member.messages), metadata=own_copy(member.metadata))
                for member in self.members
            ]
        )

    def split(self, returned: Any) -> list[list[GroupScore] | EnvironmentFault]:
        return [split_scores(returned, len(self.members))]


@dataclass(frozen=True, slots=True)
class TrialsBatch:
    """Episodes whose right and wrong answers are asked for."""

    method: ClassVar[str] = "trials"
    # A row that the environment cannot read must not hide those of others.
    shared: ClassVar[bool] = False

    episodes: Sequence[Episode]

    @classmethod
    def of(cls, items: Sequence[Episode]) -> Self:
        return cls(items)

    def __len__(self) -> int:
        return len(self.episodes)

    def invoke(self, environment: Any) -> Any:
        full = getattr(environment, "full_reward", None)
        asked = [
            (_asked(environment, "solution", one), _asked(environment, "attacks", one), full)
            for one in map(_own_episode, self.episodes)
        ]
        return _all(asked) if any(map(inspect.isawaitable, (part for one in asked for part in one))) else asked

    def split(self, returned: Any) -> list[Trials | EnvironmentFault]:
        return split_trials(returned)


AnyBatch = StepBatch | ResetBatch | CloseBatch | GroupBatch | TrialsBatch
PreparingBatch = PrepareBatch | DiscardBatch
"""Batches that only executors of this process run."""


def _asked(environment: Any, name: str, episode: Episode) -> Any:
    """What one of the optional methods returns, which may be an awaitable; None if the environment lacks it."""
    method = getattr(environment, name, None)
    # The interface's own methods only say that there is none.
    missing = method is None or getattr(type(environment), name, None) is getattr(EnvironmentInterface, name)
    return None if missing or method is None else method(episode)


async def _all(asked: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple([await part if inspect.isawaitable(part) else part for part in one]) for one in asked]


def _own_episode(episode: Episode) -> Episode:
    """An episode that shares nothing with the given one."""
    return replace(
        episode,
        messages=own_messages(episode.messages),
        metadata=own_copy(episode.metadata),
        tools=own_copy(episode.tools),
    )


def own_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages that share nothing with the given ones: role and content are texts, further fields are copied."""
    if max(map(len, messages), default=0) > 2:
        return [dict(message) if len(message) == 2 else own_copy(message) for message in messages]
    # This is done with the whole chat in each turn.
    return list(map(dict, messages))


def awaited(returned: Any) -> Any:
    """The result of a method that may be a coroutine function, in a thread without an event loop."""

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait()) if inspect.isawaitable(returned) else returned
