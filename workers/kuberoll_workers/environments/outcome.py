"""Outcome of a batched environment step for each trajectory, validated for storage."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kuberoll_workers.data.causes import Cause, ReasonName
from kuberoll_workers.data.messages import ANSWER_FIELDS
from kuberoll_workers.data.plain import NotPlain, message_of, plain, printable, repr_of, unicode_text
from kuberoll_workers.data.tool_calls import in_order_of_calls
from kuberoll_workers.data.tools import InvalidTools, Tool, checked_tools
from kuberoll_workers.data.tracebacks import Traceback, traceback_of
from kuberoll_workers.environments.exception_causes import cause_of, cause_of_wait
from kuberoll_workers.environments.interface import ChatMessage, EpisodeStart, GroupScore, Metadata, UnusableRow

MAX_TEXT = 1 << 20
"""Maximum length of an observation, and of an answer, in characters."""
MAX_NAME = 256
"""Maximum length of a reward's name, in characters."""
MAX_ROLE = 64
"""Maximum length of a role, in characters."""
MAX_REWARDS = 256
"""Maximum number of named rewards of one turn."""
MAX_MESSAGES = 64
"""Maximum number of messages that `reset` adds to a prompt, and of an observation."""
MAX_STOPS = 256
"""Maximum number of stop strings of one turn."""
MAX_STOP = 4096
"""Maximum length of a stop string, in characters."""

SHUTDOWN_SECONDS = 10.0
"""Time limit of an environment's `shutdown`."""

# A method that `tools.Function.__call__` calls.
_CALLED = re.compile(r'environments/tools\.py", line \d+, in __call__\n  File ".*", line \d+, in (\w+)')

# Halfway between the largest float32 and the next power of two: from here on, rounding gives infinity.
_BEYOND_FLOAT32 = (2 - 2**-24) * 2.0**127


class EnvironmentFault(Exception):
    """Failure of an environment; the message has bounded length and is valid Unicode.

    Attributes:
        traceback: Of the exception that the environment's code raised, or the stack of a call that is stuck; None if
            there is none.
        cause: Whose doing it is, and what shows that.
    """

    reason: ClassVar[ReasonName] = "EnvironmentRaised"
    """Its reason, where nothing else is known."""

    def __init__(self, message: str, traceback: Traceback | None = None, *, cause: Cause | None = None) -> None:
        super().__init__(printable(message))
        self.traceback = traceback
        self.cause = Cause(self.reason) if cause is None else cause


class StepRaised(EnvironmentFault):
    """The environment's `step` raised, or its process died."""


class StepTimedOut(EnvironmentFault):
    """The environment's `step` exceeded its time limit."""

    reason = "EnvironmentSilent"


class EpisodeLost(EnvironmentFault):
    """The instance of the environment does not know the episode: the one that reset it is gone."""

    reason = "EpisodeLost"


class StepInvalid(EnvironmentFault):
    """The environment's `step` did not return a valid EnvironmentReturn for its inputs."""

    reason = "EnvironmentInvalid"


class RowFault(EnvironmentFault):
    """The environment reported an unusable dataset row (`UnusableRow`); a retry would not help."""

    reason = "RowUnusable"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of one step for one trajectory.

    Attributes:
        role, content: The observation, or the last message of it; an empty content adds no tokens.
        metadata: The new episode state; None keeps the old one.
        stop_strings: Stop strings of the next generation; None clears them.
        reward: Reward of this turn: the sum of `reward_parts` if rewards are named.
        messages: All messages of the observation, if it has several or answers a tool call; else empty.
    """

    role: str
    content: str
    metadata: Metadata
    stop_strings: tuple[str, ...] | None
    reward: float
    terminated: bool
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    messages: tuple[ChatMessage, ...] = ()

    @property
    def observation(self) -> tuple[ChatMessage, ...]:
        """The observation's chat messages, at least one."""
        return self.messages or ({"role": self.role, "content": self.content},)

    def in_order_of_calls(self, response: ChatMessage) -> StepOutcome:
        """The outcome with its answers to a response's calls in their order, whatever came first."""
        if len(self.messages) < 2:
            return self
        messages = tuple(in_order_of_calls(response, self.messages))
        return dataclasses.replace(self, role=messages[-1]["role"], content=messages[-1]["content"], messages=messages)


class Outcomes(list[StepOutcome | EnvironmentFault]):
    """One entry per trajectory: its outcome, or a fault if its part of the result is invalid.

    Attributes:
        answered: True if the environment returned answers, even if they are None.
    """

    def __init__(self, outcomes: Sequence[StepOutcome | EnvironmentFault], *, answered: bool) -> None:
        super().__init__(outcomes)
        self.answered = answered


def split_return(returned: Any, size: int, *, any_metadata: bool = False) -> Outcomes:
    """Validate a batched EnvironmentReturn (5 or 6 fields, or any tuple of that form) and split it by trajectory.

    Runs code of the environment's objects (`__repr__`, `tolist`), so call it only where the environment may run.

    Args:
        returned: Return value of `step`.
        size: Number of trajectories that were stepped.
        any_metadata: Pass metadata through unchanged, for callers that neither store nor send it.

    Raises:
        StepInvalid: A whole field is invalid, so no trajectory has an outcome.
    """
    if not isinstance(returned, tuple) or len(returned) not in (5, 6):
        raise StepInvalid(
            f"step returned {repr_of(returned)}; it must return an EnvironmentReturn (observations, metadata, "
            "next_stop_strings, rewards, terminateds and, optionally, answers)"
        )
    observations = _column("observations", returned[0], size)
    metadata = _column("metadata", returned[1], size, optional=True)
    stop_strings = _column("next_stop_strings", returned[2], size, optional=True)
    parts = _reward_parts(returned[3], size)
    terminateds = _column("terminateds", returned[4], size)
    answers = _column("answers", returned[5] if len(returned) == 6 else None, size, optional=True)
    outcomes: list[StepOutcome | EnvironmentFault] = []
    for index in range(size):
        try:
            state = metadata[index]
            if state is not None and not isinstance(state, dict):
                raise StepInvalid(f"metadata[{index}] is {repr_of(state)}; it must be an object or None")
            outcomes.append(
                _outcome(
                    index,
                    observations[index],
                    state if any_metadata or state is None else plain(state, "metadata"),
                    stop_strings[index],
                    {name: values[index] for name, values in parts.items()},
                    terminateds[index],
                    answers[index],
                )
            )
        except NotPlain as error:
            outcomes.append(StepInvalid(str(error)))
        except StepInvalid as fault:
            outcomes.append(fault)
    return Outcomes(outcomes, answered=len(returned) == 6)


def split_starts(returned: Any, size: int) -> list[EpisodeStart | EnvironmentFault]:
    """Validate what `reset` returned and split it by episode; see `split_return`.

    Raises:
        StepInvalid: It has not one element for each episode.
    """
    starts: list[EpisodeStart | EnvironmentFault] = []
    for index, start in enumerate(_column("what reset returned", returned, size)):
        try:
            starts.append(_start(index, start))
        except NotPlain as error:
            starts.append(StepInvalid(str(error)))
        except StepInvalid as fault:
            starts.append(fault)
    return starts


def _start(index: int, start: Any) -> EpisodeStart:
    if start is None:
        return EpisodeStart()
    if not isinstance(start, EpisodeStart):
        raise StepInvalid(f"reset returned {repr_of(start)} for episode {index}; it must be an EpisodeStart or None")
    if start.metadata is not None and not isinstance(start.metadata, dict):
        raise StepInvalid(f"metadata[{index}] is {repr_of(start.metadata)}; it must be an object or None")
    if not isinstance(start.messages, list | tuple) or len(start.messages) > MAX_MESSAGES:
        raise StepInvalid(f"messages[{index}] must be a list of at most {MAX_MESSAGES} messages")
    messages = [_message(f"messages[{index}][{number}]", message) for number, message in enumerate(start.messages)]
    return EpisodeStart(
        messages=messages,
        metadata=None if start.metadata is None else plain(start.metadata, "metadata"),
        stop_strings=_stops(index, start.stop_strings),
        tools=_tools(index, start.tools),
    )


def _tools(index: int, tools: Any) -> list[Tool] | None:
    if tools is None:
        return None
    try:
        return checked_tools(tools, f"tools[{index}]")
    except InvalidTools as error:
        raise StepInvalid(str(error)) from error


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise StepInvalid(f"{where} is {repr_of(message)}; it must be a role and a content (text)")
    return {
        "role": _role(f"{where}.role", message["role"]),
        "content": _text(f"{where}.content", message.get("content"), MAX_TEXT),
    }


def check_start(start: EpisodeStart) -> EpisodeStart:
    """The start, after the checks of `split_starts` for what another process sent; its metadata is not checked.

    Raises:
        StepInvalid, NotPlain: The message names the field.
    """
    return dataclasses.replace(_start(0, dataclasses.replace(start, metadata=None)), metadata=start.metadata)


def split_scores(returned: Any, size: int) -> list[GroupScore]:
    """Validate what `score_group` returned; scores are relative, so an invalid one makes all of its group invalid.

    Raises:
        StepInvalid, NotPlain: A score is invalid, or there is not one for each member.
    """
    column = _column("what score_group returned", returned, size)
    return [_score(index, value) for index, value in enumerate(column)]


def _score(index: int, value: Any) -> GroupScore:
    score = value if isinstance(value, GroupScore) else GroupScore(reward=value)
    if score.metadata is not None and not isinstance(score.metadata, dict):
        raise StepInvalid(f"metadata[{index}] is {repr_of(score.metadata)}; it must be an object or None")
    metadata = None if score.metadata is None else plain(score.metadata, "metadata")
    return GroupScore(reward=_number(index, SCALAR, score.reward), metadata=metadata)


def check_reward(total: float, where: str = "rewards") -> None:
    """Reject a sum of rewards that float32, which trainers use, cannot represent.

    Raises:
        StepInvalid: The message names the sum.
    """
    if not -_BEYOND_FLOAT32 < total < _BEYOND_FLOAT32:
        raise StepInvalid(f"{where} is {total:g}; a reward must be finite as a 32-bit float")


def check_outcome(outcome: StepOutcome) -> None:
    """Reject an outcome that `split_return` would not have created; metadata is not checked.

    Raises:
        StepInvalid, NotPlain: The message names the field.
    """
    _role("observation.role", outcome.role)
    _text("observation.content", outcome.content, MAX_TEXT)
    if outcome.messages:
        _several("observation", outcome.messages)
    _stops(0, outcome.stop_strings)
    check_reward(outcome.reward)
    if len(outcome.reward_parts) > MAX_REWARDS:
        raise StepInvalid(f"rewards has {len(outcome.reward_parts)} names; at most {MAX_REWARDS} are taken")
    for name, value in outcome.reward_parts.items():
        check_reward(value, f"rewards[{_text('a name in rewards', name, MAX_NAME)!r}]")
    if outcome.answer is not None:
        _text("answer", outcome.answer, MAX_TEXT)


def fault_of(error: BaseException, method: str = "step") -> EnvironmentFault:
    """The fault for an exception of a method of an environment, of whatever class."""
    if isinstance(error, EnvironmentFault):
        if error.cause == Cause(StepRaised.reason) and error.__cause__ is not None:
            error.cause = cause_of(error.__cause__)
        return error
    if isinstance(error, NotPlain):
        return StepInvalid(str(error))
    if isinstance(error, UnusableRow):
        return RowFault(message_of(error))
    return StepRaised(
        f"{method} raised {type(error).__name__}: {message_of(error)}", traceback_of(error), cause=cause_of(error)
    )


def timeout_message(timeout: float, method: str = "step") -> str:
    """Message for a call that exceeded its time limit."""
    limit = f"{timeout:g} s" if method == "shutdown" else f"stepTimeoutSeconds ({timeout:g} s)"
    return f"{method} took longer than {limit}"


def timed_out(seconds: float, method: str, stack: Traceback | None) -> StepTimedOut:
    """The fault for a call that has exceeded its time limit.

    Args:
        stack: The calls that it is in; None if they are unknown.
    """
    tool = None if stack is None else _called_tool(stack)
    where = f", in the tool {tool!r}" if tool else ""
    return StepTimedOut(timeout_message(seconds, method) + where, stack, cause=cause_of_wait(stack))


SCALAR = ""
"""Internal name of an unnamed reward."""


def _outcome(
    index: int, observation: Any, metadata: Any, stops: Any, rewards: dict[str, Any], terminated: Any, answer: Any
) -> StepOutcome:
    messages = _observation(f"observations[{index}]", observation)
    numbers = {name: _number(index, name, value) for name, value in rewards.items()}
    reward = sum(numbers.values())
    if len(numbers) > 1:
        check_reward(reward, f"the sum of rewards[{index}]")
    return StepOutcome(
        role=messages[-1]["role"],
        content=messages[-1]["content"],
        metadata=metadata,
        stop_strings=_stops(index, stops),
        reward=reward,
        terminated=_flag(index, terminated),
        reward_parts={} if SCALAR in numbers else numbers,
        answer=None if answer is None else _text("the answer", str(answer), MAX_TEXT),
        messages=messages if len(messages) > 1 or len(messages[0]) > 2 else (),
    )


def _observation(where: str, observation: Any) -> tuple[ChatMessage, ...]:
    """The messages of an observation: one, or a list of several."""
    if isinstance(observation, Mapping):
        return (_observed(where, observation),)
    if isinstance(observation, list | tuple):
        return _several(where, observation) if observation else ({"role": "environment", "content": ""},)
    raise StepInvalid(
        f"{where} is {repr_of(observation)}; it must be a role and a content (text), or a list of such messages"
    )


def _several(where: str, observation: Sequence[Any]) -> tuple[ChatMessage, ...]:
    if len(observation) > MAX_MESSAGES:
        raise StepInvalid(f"{where} has {len(observation)} messages; at most {MAX_MESSAGES} are taken")
    return tuple(_observed(f"{where}[{number}]", message) for number, message in enumerate(observation))


def _observed(where: str, message: Any) -> ChatMessage:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise StepInvalid(f"{where} is {repr_of(message)}; it must be a role and a content (text)")
    observed: ChatMessage = {
        "role": _role(f"{where}.role", message.get("role", "environment")),
        "content": _text("the observation's content", message["content"], MAX_TEXT),
    }
    for name in ANSWER_FIELDS:
        if message.get(name) is not None:
            observed[name] = _text(f"the observation's {name}", message[name], MAX_NAME)
    return observed


_USUAL_ROLES = frozenset({"environment", "user", "tool", "system", "assistant"})
# Chat templates write a role as it is between their special tokens.
_ROLE = re.compile(r"\w(?:[\w .:-]*\w)?")


def _role(where: str, value: Any) -> str:
    if type(value) is str and value in _USUAL_ROLES:
        return value
    role = _text(where, value, MAX_ROLE)
    if not _ROLE.fullmatch(role):
        raise StepInvalid(
            f"{where} is {repr_of(role)}; a role is a name of letters, digits and, between them, spaces and any of "
            "_ - . :, such as environment, user or tool"
        )
    return role


def _text(where: str, value: Any, limit: int) -> str:
    # Fast path for nearly all texts.
    if type(value) is str and len(value) <= limit and value.isascii():
        return value
    if not isinstance(value, str):
        raise StepInvalid(f"{where} is {repr_of(value)}; it must be a text")
    if len(value) > limit:
        raise StepInvalid(f"{where} has {len(value)} characters; at most {limit} are taken")
    return unicode_text(value, where)


def _stops(index: int, stops: Any) -> tuple[str, ...] | None:
    if stops is None:
        return None
    if not (_is_list(stops) and all(isinstance(stop, str) and stop for stop in stops)):
        raise StepInvalid(f"next_stop_strings[{index}] is {repr_of(stops)}; it must be a list of texts or None")
    if len(stops) > MAX_STOPS:
        raise StepInvalid(f"next_stop_strings[{index}] has {len(stops)} texts; at most {MAX_STOPS} are taken")
    where = f"next_stop_strings[{index}]"
    return tuple(_text(f"{where}[{number}]", stop, MAX_STOP) for number, stop in enumerate(stops)) or None


def _plain(value: Any) -> Any:
    """Arrays, tensors and their elements, of any library, as Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


def _flag(index: int, value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    # Numeric tensors use 0 and 1.
    plain = _plain(value)
    if not isinstance(plain, bool | int | float) or plain not in (0, 1):
        raise StepInvalid(f"terminateds[{index}] is {repr_of(value)}; it must be a boolean")
    return bool(plain)


def _column(name: str, values: Any, size: int, *, optional: bool = False) -> Sequence[Any]:
    if values is None and optional:
        return [None] * size
    plain = _plain(values)
    if isinstance(plain, str | bytes) or not isinstance(plain, Sequence):
        raise StepInvalid(f"{name} is {repr_of(values)}; it must hold one element per trajectory")
    if len(plain) != size:
        raise StepInvalid(f"{name} has {len(plain)} elements for {size} trajectories")
    return plain


def _reward_parts(rewards: Any, size: int) -> dict[str, Sequence[Any]]:
    if isinstance(rewards, Mapping):
        if not 0 < len(rewards) <= MAX_REWARDS:
            number = "an empty dict" if not rewards else f"a dict of {len(rewards)}"
            raise StepInvalid(f"rewards is {number}; it must name at least one reward and at most {MAX_REWARDS}")
        named = {_reward_name(name): values for name, values in rewards.items()}
        if len(named) != len(rewards):
            raise StepInvalid("rewards has two names that are the same as texts")
        return {name: _column(f"rewards[{name!r}]", values, size) for name, values in named.items()}
    column = [_plain(reward) for reward in _column("rewards", rewards, size)]
    widths = {len(row) if isinstance(row, list | tuple) else None for row in column}
    if widths <= {None}:
        return {SCALAR: column}
    (width, *others) = widths
    if others or not width:
        raise StepInvalid("rewards has rows of different lengths; each trajectory needs the same number of rewards")
    if width > MAX_REWARDS:
        raise StepInvalid(f"rewards has {width} rewards for each trajectory; at most {MAX_REWARDS} are taken")
    # A matrix with one column per reward, under NeMo RL's names.
    return {f"reward{number + 1}": [row[number] for row in column] for number in range(width)}


def _reward_name(name: Any) -> str:
    text = str(name)
    if not text:
        raise StepInvalid("rewards has an empty name")
    return _text("a name in rewards", text, MAX_NAME)


def _number(index: int, name: str, value: Any) -> float:
    if type(value) is float and -_BEYOND_FLOAT32 < value < _BEYOND_FLOAT32:
        return value
    where = f"rewards[{index}]" if name == SCALAR else f"rewards[{name!r}][{index}]"
    plain = _plain(value)
    try:
        number = float("text" if isinstance(plain, str | bytes) else plain)
    except (TypeError, ValueError, OverflowError):
        raise StepInvalid(f"{where} is {repr_of(value)}; it must be a number") from None
    check_reward(number, where)
    return number


def _called_tool(stack: Traceback) -> str | None:
    """Name of the tool that was being called; None if it was none."""
    found = _CALLED.search(stack.text)
    return None if found is None else found[1]
