"""The environment interface, compatible with NeMo RL's `nemo_rl.environments.interfaces`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self

from typing_extensions import TypeVar

from kuberoll_workers.data.causes import NO_EVIDENCE, Evidence, ReasonName
from kuberoll_workers.data.stop_reasons import DropReason, StopReason
from kuberoll_workers.data.tools import Tool

ChatMessage = dict[str, Any]
"""`{"role": ..., "content": ...}`, as in chat APIs.

A response that calls tools has `tool_calls`, `text`, what it says beside them, and `invalid_tool_calls` for calls that
cannot be read. An answer to a call has the role `tool` and its `tool_call_id`.
"""

Metadata = dict[str, Any] | None

Observation = Mapping[str, str] | Sequence[Mapping[str, str]]
"""A chat message of the environment, or several."""

Recovery = Literal["metadata", "replay", "restart"]
"""How an episode goes on when its environment's process, or its worker, is gone.

`metadata`: from its metadata, which is its whole state, in any instance of the environment. `replay`: another instance
resets it and steps it again with the same responses. `restart`: its trajectory starts over.
"""

EndReason = Literal[StopReason, DropReason, "interrupted", "lost"]
"""Why an episode ended: the trajectory's stop reason, or why it was dropped (`data.stop_reasons`); `interrupted`: the
run was ended; `lost`: its state is unknown after a failure, and it is about to be reset again.
"""

MetadataT = TypeVar("MetadataT", default=Any)
"""Documentation only: type of an episode's state, if the environment's class names it in brackets."""


class UnusableRow(ValueError):
    """The dataset's row is wrong; raise it from `step` if the metadata is unusable, whatever the policy writes.

    The trajectory fails permanently at once, as a failure of the data: neither a retry nor another policy would help.
    """


class Unavailable(Exception):
    """What the environment depends on is out of reach: a service, a machine, a disk; raise it, or a class of it.

    It is nobody's reward: the step is tried again, and the trajectory's failure is one of the infrastructure.

    Attributes:
        reason: Its reason (`data.causes`).
        evidence: What shows it.
    """

    reason: ClassVar[ReasonName] = "DependencyUnavailable"
    # Also of a class whose other base has an `__init__` that does not come here.
    evidence: Evidence = NO_EVIDENCE

    def __init__(self, message: str = "", *, evidence: Evidence = NO_EVIDENCE) -> None:
        super().__init__(message)
        self.evidence = evidence


class _Absent:
    """Marker of a field that was not given, because None is a valid value."""


_ABSENT = _Absent()


class EnvironmentReturn(tuple[Any, ...]):
    """Result of one `step`; every element has one entry per trajectory, in the order of the inputs.

    A named tuple of 5 elements, or of 6 if it is created with `answers`: older environments and callers without answers
    unpack 5, newer ones 6. Positional and keyword arguments, attributes, `_replace`, `_asdict`, equality and pickling
    are those of a named tuple.

    Attributes:
        observations: The environment's messages, `{"role", "content"}`; an empty content adds no tokens. In place of
            one message, a trajectory may have a list of several, such as answers to tool calls, each `{"role": "tool",
            "tool_call_id", "content"}`.
        metadata: The new episode states; `None` keeps the old state, as an element or as a whole.
        next_stop_strings: Stop strings of each trajectory's next generation; `None` clears them.
        rewards: Rewards of this turn: a sequence, array or tensor of numbers, or a dict of named ones (their sum
            counts). A matrix has a row for each trajectory and in each column a reward of its own, named `reward1`,
            `reward2`, … as in NeMo RL.
        terminateds: True for each episode that ended: a sequence, array or tensor of booleans.
        answers: Extracted answers, for majority voting; None if they were not given.
    """

    __slots__ = ()

    __match_args__ = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")
    _fields = __match_args__

    def __new__(
        cls,
        observations: Sequence[Observation],
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
    def observations(self) -> Sequence[Any]:
        found: Sequence[Any] = self[0]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that begins.

    Attributes:
        id: Name of the episode, the same in `reset` and `close`. An episode that is reset again keeps it.
        messages: The prompt's chat messages.
        metadata: The row's metadata.
        tools: Tools of the row, in the form of OpenAI's chat API; None if it declares none.
        seed: Seed for everything random, 63 bits. It is the same for all episodes of a prompt group, which must begin
            in the same state, and for an episode that is reset again.
        max_turns: Number of turns after which the trajectory is truncated.
    """

    id: str
    messages: Sequence[ChatMessage]
    metadata: Metadata
    seed: int
    max_turns: int
    tools: Sequence[Tool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """The start of an episode, as `reset` returns it.

    Attributes:
        messages: Chat messages that are added to the prompt, such as the first observation; each with `role` and
            `content`.
        metadata: The initial state; None: the row's metadata.
        stop_strings: Stop strings of the first turn; None: those of the row, or of the job.
        tools: Tools that the policy may call, in the form of OpenAI's chat API: `{"type": "function", "function":
            {"name", "description", "parameters"}}`; None: those of the row.
    """

    messages: Sequence[Mapping[str, str]] = ()
    metadata: Metadata = None
    stop_strings: Sequence[str] | None = None
    tools: Sequence[Tool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The end of an episode.

    Attributes:
        id: Name of the episode.
        metadata: Its newest state.
        reason: Why it ended.
    """

    id: str
    metadata: Metadata
    reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An ended trajectory of a prompt group that is complete.

    Attributes:
        id: Name of its episode.
        messages: Its whole chat: prompt, responses and observations.
        metadata: The newest state of its episode.
        reward: Sum of the rewards of its turns.
        stop_reason: That of a finished trajectory, such as `terminated`.
        answer: The last answer that was extracted; None if there is none.
        group_reward: Reward that it has from an earlier call, which stays; None: it has none. Only a sample that failed
            and is run again by a resumed run meets members with one.
    """

    id: str
    messages: Sequence[ChatMessage]
    metadata: Metadata
    reward: float
    stop_reason: str
    answer: str | None = None
    group_reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """The score of one trajectory within its prompt group.

    Attributes:
        reward: Added to the rewards of its turns; finite.
        metadata: The trajectory's final state, such as with what a judge said; None keeps the state.
    """

    reward: float
    metadata: Metadata = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCase:
    """Responses whose reward is known: `kuberoll env test` plays them.

    Attributes:
        row: A dataset row, as `generate_dataset` returns it; a prompt is optional.
        responses: The policy's responses, one for each turn.
        reward: The sum of the rewards of all turns: a number, or the lowest and the highest that are right.
        seed: Seed of the episode, for environments with `reset`.
    """

    row: Mapping[str, Any]
    responses: Sequence[str]
    reward: float | tuple[float, float]
    seed: int = 0


Responses = Sequence[str | ChatMessage]
"""The policy's responses of one episode, one for each turn: texts, or messages where they call tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Responses that show whether the rewards of a row can be trusted, as `solution` and `attacks` give them.

    Attributes:
        solutions: Right answers by name, each the messages of its turns; empty: the environment knows none.
        attacks: Wrong answers by name, which must not get the full reward.
        full_reward: Reward of a right answer; None: the environment does not say.
    """

    solutions: Mapping[str, Sequence[ChatMessage]]
    attacks: Mapping[str, Sequence[ChatMessage]]
    full_reward: float | None = None


class EnvironmentInterface(abc.ABC, Generic[MetadataT]):
    """Interface of environments, which step batches of episodes.

    An environment is best without state of its own: everything that an episode needs is in its `metadata`, a JSON
    object. Then a step can be retried, a trajectory can move to another worker, and a killed run can resume. One that
    holds an object or a session for each episode makes them in `reset`, frees them in `close`, and names in `recovery`
    how an episode goes on without them. The constructor takes one argument, the `config` object of the RolloutJob's
    environment. Methods may be coroutine functions.

    Attributes:
        recovery: How an episode goes on when the instance that it was reset in is gone.
        declares_tools: Whether `reset` declares tools in every episode: then a chat template that leaves tools out is
            refused before the engine is started.
        scoring_cases: Responses with known rewards, right and wrong ones, for `kuberoll env test`; or a method without
            arguments that returns them.
        row_metadata: Fields of a dataset row's `metadata` that the environment reads, each with a few words, for
            `kuberoll env list`.
        prepare_ahead: Maximum number of episodes that are prepared and have not begun, of one with `prepare`; 0: none;
            None: a part of rollout.concurrency.
        full_reward: Reward of a right answer, for `kuberoll certify`; None: 1.
        unprovable: Why `kuberoll certify` can try no row, in a few words; None: it can.
        recorded: Field of a row's metadata with recorded verdicts, with which a row is tried all the same, by the
            environment's own right and wrong answers alone; None: there is none.
    """

    recovery: ClassVar[Recovery] = "metadata"
    declares_tools: ClassVar[bool] = False
    scoring_cases: ClassVar[Sequence[ScoringCase | Mapping[str, Any]] | Callable[..., Any]] = ()
    row_metadata: ClassVar[Mapping[str, str]] = {}
    prepare_ahead: int | None = None
    full_reward: ClassVar[float | None] = None
    unprovable: ClassVar[str | None] = None
    recorded: ClassVar[str | None] = None

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
                `answer` (loaded on access), `task_name`, `task_index`, `rollout_index`, `total_reward`, `stop_reason`,
                `turn_count`; one entry per trajectory.

        Returns:
            The batch (changed or not) and the environment's own metrics.
        """

    def check_row(self, metadata: Metadata) -> None:
        """Check what a dataset row says, before an engine is started; optional.

        Called for every row of this environment. It should be fast: a dataset may have millions of rows.

        Args:
            metadata: The row's metadata, the initial episode state.

        Raises:
            UnusableRow: `step` could not evaluate an episode of this row; the message names the field.
        """

    def reset(self, episodes: list[Episode]) -> Sequence[EpisodeStart | None]:
        """Begin episodes; optional. Called once for each trajectory, before its first generation.

        Returns:
            The start of each, in the same order; None adds nothing to the row.

        Raises:
            UnusableRow: A row's metadata is wrong.
        """
        return [None] * len(episodes)

    def prepare(self, episodes: list[Episode]) -> None:
        """Begin to get ready what episodes will need that begin next, while others run; optional.

        It returns at once, and what takes time goes on by itself. Only of environments whose `step` is a coroutine
        function, with isolation Inline. An episode begins whether or not it was prepared, and what failed here is done
        again, and reported, then.

        Args:
            episodes: As their `reset` would be given them.
        """

    def discard(self, names: list[str]) -> None:
        """Free what was prepared for episodes, as far as they have not used it; of all environments with `prepare`.

        Called for each that was prepared: when it has ended, or as soon as it is known that it will not begin.

        Args:
            names: `Episode.id` of each.
        """

    def close(self, episodes: list[EpisodeEnd]) -> None:
        """Free what episodes hold; optional.

        Called once for each `reset`, however the episode ended, also if `reset` raised an exception; not if the process
        of the instance is gone. With `recovery` `metadata`, an interrupted episode that will be resumed stays open, and
        the instance that ends it may not be the one that reset it.
        """

    def score_group(self, members: list[GroupMember]) -> Sequence[float | GroupScore]:
        """Score the trajectories of one prompt group together, once all of them have ended; optional.

        Called after their episodes have been closed, in any instance, before the trajectories are stored. Trajectories
        that failed or were dropped, or that have no turn, are left out. It should return the same scores for the same
        members: a run that is killed before they are stored calls it again.

        Args:
            members: By rollout index; must not be changed in place.

        Returns:
            One score for each, in the same order: a number, or a `GroupScore`.

        Raises:
            UnusableRow: The row's metadata is wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score groups")

    def solution(self, episode: Episode) -> Responses | Mapping[str, Responses] | None:
        """The right answer of a row, for `kuberoll certify`; optional.

        Called in any instance, and not between `reset` and `close`: it must depend on nothing but its argument.

        Args:
            episode: With the messages and the metadata that `reset` has added, if there is one.

        Returns:
            The responses of all turns; several solutions by name, which must all be right; None: none is known.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no solutions")

    def attacks(self, episode: Episode) -> Mapping[str, Responses]:
        """Wrong answers by name that a careless grader may accept, for `kuberoll certify`; optional.

        Called as `solution` is. No answer, the prompt itself and the like are tried with every environment.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no attacks")

    def shutdown(self) -> None:
        """Free what the environment holds; optional. Called once, after all episodes have ended."""

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Generate `count` dataset rows, the same ones for the same seed; optional.

        Returns:
            Rows with `messages` (the prompt's chat messages) and optionally `metadata` (the initial episode state),
            `stop_strings` (of the first turn) and `idx`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generator: give the job a dataset.source.uri or rows")
