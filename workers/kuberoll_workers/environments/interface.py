"""The environment interface, compatible with NeMo RL's `nemo_rl.environments.interfaces`."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Self

from typing_extensions import TypeVar

ChatMessage = dict[str, Any]
"""`{"role": ..., "content": ...}`, as in chat APIs."""

Metadata = dict[str, Any] | None

MetadataT = TypeVar("MetadataT", default=Any)
"""Documentation only: type of an episode's state, if the environment's class names it in brackets."""


class UnusableRow(ValueError):
    """The dataset's row is wrong; raise it from `step` if the metadata is unusable, whatever the policy writes.

    The trajectory fails permanently at once, as a failure of the data: neither a retry nor another policy would help.
    """


class _Absent:
    """Marker of a field that was not given, because None is a valid value."""


_ABSENT = _Absent()


class EnvironmentReturn(tuple[Any, ...]):
    """Result of one `step`; every element has one entry per trajectory, in the order of the inputs.

    A named tuple of 5 elements, or of 6 if it is created with `answers`: older environments and callers without answers
    unpack 5, newer ones 6. Positional and keyword arguments, attributes, `_replace`,
    `_asdict`, equality and pickling are those of a named tuple.

    Attributes:
        observations: The environment's messages, `{"role", "content"}`; an empty content adds no tokens.
        metadata: The new episode states; `None` keeps the old state, as an element or as a whole.
        next_stop_strings: Stop strings of each trajectory's next generation; `None` clears them.
        rewards: Rewards of this turn: a sequence, array or tensor of numbers, or a dict of named ones (their sum
            counts).
        terminateds: True for each episode that ended: a sequence, array or tensor of booleans.
        answers: Extracted answers, for majority voting; None if they were not given.
    """

    __slots__ = ()

    __match_args__ = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")
    _fields = __match_args__

    def __new__(
        cls,
        observations: Sequence[Mapping[str, str]],
        metadata: Sequence[Metadata] | None,
        next_stop_strings: Sequence[Sequence[str] | None] | None,
        rewards: Any,
        terminateds: Any,
        answers: Sequence[str | None] | _Absent | None = _ABSENT,
    ) -> Self:
        values = (observations, metadata, next_stop_strings, rewards, terminateds)
        return super().__new__(cls, values if isinstance(answers, _Absent) else (*values, answers))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:
        return cls(*iterable)

    @property
    def observations(self) -> Sequence[Mapping[str, str]]:
        found: Sequence[Mapping[str, str]] = self[0]
        return found

    @property
    def metadata(self) -> Sequence[Metadata] | None:
        found: Sequence[Metadata] | None = self[1]
        return found

    @property
    def next_stop_strings(self) -> Sequence[Sequence[str] | None] | None:
        found: Sequence[Sequence[str] | None] | None = self[2]
        return found

    @property
    def rewards(self) -> Any:
        return self[3]

    @property
    def terminateds(self) -> Any:
        return self[4]

    @property
    def answers(self) -> Sequence[str | None] | None:
        found: Sequence[str | None] | None = self[5] if len(self) > 5 else None
        return found

    def _asdict(self) -> dict[str, Any]:
        # Without answers there are fewer values than field names.
        return dict(zip(self._fields, self, strict=False))

    def _replace(self, **changes: Any) -> Self:
        unknown = [name for name in changes if name not in self._fields]
        if unknown:
            raise ValueError(f"Got unexpected field names: {unknown!r}")
        return type(self)(**{**self._asdict(), **changes})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({fields})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)


class EnvironmentInterface(abc.ABC, Generic[MetadataT]):
    """Interface of environments, which step batches of episodes.

    Instances hold no episode state: everything that an episode needs is in its `metadata`, a JSON object. This allows a
        step
    to be retried, a trajectory to move to another worker, and a killed run to resume. The constructor takes one
    argument,
    the `config` object of the RolloutJob's environment.
    """

    @abc.abstractmethod
    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        """Evaluate the last message of each log and answer it.

        Args:
            message_log_batch: One chat log per trajectory, from the prompt to the policy's newest message.
            metadata: One episode state per trajectory, in the same order; must not be changed in place.

        Raises:
            UnusableRow: A row's metadata is wrong: the dataset is at fault, neither the policy nor the environment.
        """

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Compute metrics; called once after the run, with all finished trajectories of this environment.

        Args:
            batch: A mutable mapping of columns, by task and rollout index: `message_log`, `extra_env_info`, `idx`,
                `answer` (loaded on access), `task_name`, `task_index`, `rollout_index`,
                `total_reward`, `stop_reason`, `turn_count`; one entry per trajectory.

        Returns:
            The batch (changed or not) and the environment's own metrics.
        """

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Generate `count` dataset rows, the same ones for the same seed; optional.

        Returns:
            Rows with `messages` (the prompt's chat messages) and optionally `metadata` (the initial episode state),
            `stop_strings` (of the first turn) and `idx`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generator: give the job a dataset.source.uri or rows")
