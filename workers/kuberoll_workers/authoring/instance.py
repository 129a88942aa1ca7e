"""Instances of an environment as plain function calls, and episodes that are played in them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from kuberoll_workers.authoring.subject import Subject
from kuberoll_workers.data.text import one_line
from kuberoll_workers.data.tool_calls import message_fields, parse_tool_calls
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.environments.batches import Batch, CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EndReason,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
)
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome
from kuberoll_workers.environments.registry import UnusableEnvironment

BatchOf = Callable[[Sequence[StepItem]], StepBatch]
"""Makes the batch of some steps."""

SHOWN = 300
"""Maximum length of a text in a report, in characters."""
_BEGINNING = 40


class CallFailed(Exception):
    """A call of the environment failed.

    Attributes:
        fault: Why.
        place: Dataset row, turn and response, one line each.
    """

    def __init__(self, fault: EnvironmentFault, place: Sequence[str] = ()) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.place = list(place)

    @property
    def traceback(self) -> Traceback | None:
        return self.fault.traceback


@dataclass(frozen=True, slots=True)
class Script:
    """Responses to play to a row.

    Attributes:
        id: Name of its episode, which is the same each time.
    """

    id: str
    row: Row
    responses: tuple[str, ...]
    seed: int = 0

    @property
    def episode(self) -> Episode:
        """The episode that begins."""
        return Episode(
            id=self.id,
            messages=copy.deepcopy(self.row.messages),
            metadata=copy.deepcopy(self.row.metadata),
            seed=self.seed,
            max_turns=max(1, len(self.responses)),
            tools=copy.deepcopy(self.row.tools),
        )

    def place(self, turn: int | None = None) -> list[str]:
        """Where something happened, for a report; `turn` counts from 0."""
        lines = [f"row:      {self.row.where}, metadata {json_text(self.row.metadata)}"]
        if turn is not None:
            lines += [f"turn {turn + 1}:   response {shown(self.responses[turn])}"]
        return lines


class Play:
    """One episode that is being played.

    Attributes:
        tools: Tools that the policy may call; None without any.
        log: The messages so far.
        metadata: Its newest state.
        outcomes: Those of its steps.
    """

    def __init__(self, script: Script, start: EpisodeStart) -> None:
        self.script = script
        self.start = start
        self.tools = start.tools if start.tools is not None else script.row.tools
        self.log: list[ChatMessage] = [dict(message) for message in (*script.row.messages, *start.messages)]
        self.metadata = copy.deepcopy(start.metadata if start.metadata is not None else script.row.metadata)
        self.outcomes: list[StepOutcome] = []

    @property
    def ended(self) -> bool:
        """True if the environment ended it, or all responses were played."""
        over = bool(self.outcomes) and self.outcomes[-1].terminated
        return over or len(self.outcomes) == len(self.script.responses)

    @property
    def reward(self) -> float:
        return sum(outcome.reward for outcome in self.outcomes)

    def item(self, *, named: bool) -> StepItem:
        """The next step; `named`: with the name of its episode."""
        log = [*map(dict, self.log), self._response()]
        return StepItem(log, self.metadata, self.script.id if named else None)

    def add(self, outcome: StepOutcome) -> None:
        # Not the log of the step, which the environment may have changed.
        response = self._response()
        outcome = outcome.in_order_of_calls(response)
        self.log = [*self.log, response, *outcome.observation]
        if outcome.metadata is not None:
            self.metadata = outcome.metadata
        self.outcomes.append(outcome)

    def calls(self, name: str) -> Sequence[Any]:
        """Calls in the newest response, by their field of its chat message."""
        response = self.log[-1 - len(self.outcomes[-1].observation)]
        found: Sequence[Any] = response.get(name, ())
        return found

    def _response(self) -> ChatMessage:
        """The response that is to be played, with its calls of tools, as the loop makes it."""
        text = self.script.responses[len(self.outcomes)]
        fields = message_fields(parse_tool_calls(text), len(self.outcomes) + 1) if self.tools else {}
        return {"role": "assistant", "content": text, **fields}

    def end(self, reason: EndReason = "terminated") -> EpisodeEnd:
        return EpisodeEnd(id=self.script.id, metadata=self.metadata, reason=reason)

    def member(self) -> GroupMember:
        """The trajectory as `score_group` gets it."""
        answers = [outcome.answer for outcome in self.outcomes if outcome.answer is not None]
        return GroupMember(
            id=self.script.id,
            messages=copy.deepcopy(self.log),
            metadata=self.metadata,
            reward=self.reward,
            stop_reason="terminated" if self.outcomes[-1].terminated else "max_turns",
            answer=answers[-1] if answers else None,
        )

    def pass_through_json(self) -> None:
        """Replace the state by what its JSON says, as after the loss of a worker."""
        self.metadata = orjson.loads(orjson.dumps(self.metadata))

    def difference(self, other: Play, *, states: bool = False, turns: int | None = None) -> str | None:
        """The first difference of what the policy sees and gets in two plays; None if there is none.

        Args:
            states: Compare the states, too.
            turns: Compare the first turns only.
        """
        ours, others = self.outcomes[:turns], other.outcomes[:turns]
        mine, theirs = list(map(dict, self.start.messages)), list(map(dict, other.start.messages))
        if mine != theirs:
            return f"reset returned the messages {json_text(theirs)} instead of {json_text(mine)}"
        if self.start.stop_strings != other.start.stop_strings:
            return f"reset returned the stop strings {other.start.stop_strings} instead of {self.start.stop_strings}"
        if self.tools != other.tools:
            return f"reset returned the tools {json_text(other.tools)} instead of {json_text(self.tools)}"
        for turn, (one, two) in enumerate(zip(ours, others, strict=False)):
            for name, label in _COMPARED.items():
                if getattr(one, name) != getattr(two, name):
                    return (
                        f"turn {turn + 1}, after the response {shown(self.script.responses[turn], 80)}: "
                        f"{label} {shown(getattr(two, name))} instead of {shown(getattr(one, name))}"
                    )
            if states and one.metadata != two.metadata:
                return f"turn {turn + 1}: metadata {json_text(two.metadata)} instead of {json_text(one.metadata)}"
        if len(ours) != len(others):
            return f"{len(others)} turns instead of {len(ours)}"
        return None


_COMPARED = {
    "role": "the observation's role is",
    "content": "the observation is",
    "messages": "the observation's messages are",
    "reward": "the reward is",
    "reward_parts": "the named rewards are",
    "terminated": "terminated is",
    "stop_strings": "the stop strings are",
    "answer": "the answer is",
}


class Instance:
    """One instance of an environment.

    Attributes:
        environment: The object; None if it is in a process of its own.
        hooks: Its optional methods.
    """

    def __init__(self, runner: asyncio.Runner, executor: Executor, environment: Any) -> None:
        """
        Raises:
            UnusableEnvironment: It cannot be created.
        """
        self._runner = runner
        self._executor = executor
        self.environment = environment
        try:
            self.hooks: Hooks = runner.run(executor.hooks())
        except EnvironmentFault as fault:
            raise UnusableEnvironment(str(fault), fault.traceback) from fault

    def run(self, batch: Batch[Any], places: Sequence[Sequence[str]]) -> list[Any]:
        """Run a call.

        Args:
            places: Where each episode of the batch is, for errors.

        Raises:
            CallFailed: It failed for one of them, or for all.
        """

        async def call() -> Sequence[Any]:
            return await self._executor.run(batch)

        try:
            results = self._runner.run(call())
        except EnvironmentFault as fault:
            of_batch = [f"in a batch of {len(places)}; the first of them:"] if len(places) > 1 else []
            raise CallFailed(fault, [*of_batch, *places[0]]) from fault
        for result, place in zip(results, places, strict=True):
            if isinstance(result, EnvironmentFault):
                raise CallFailed(result, place)
        return list(results)

    def begin(self, scripts: Sequence[Script]) -> list[Play]:
        """Reset episodes, in one call; without a hook they just begin.

        Raises:
            CallFailed: `reset` failed.
        """
        starts: Sequence[EpisodeStart] = [EpisodeStart()] * len(scripts)
        if self.hooks.reset or self.hooks.stateful:
            batch = ResetBatch([script.episode for script in scripts])
            starts = self.run(batch, [script.place() for script in scripts])
        return [Play(script, start) for script, start in zip(scripts, starts, strict=True)]

    def step(self, plays: Sequence[Play], batch: BatchOf = StepBatch) -> None:
        """Step episodes, in one call.

        Raises:
            CallFailed: `step` failed.
        """
        items = [play.item(named=self.hooks.stateful) for play in plays]
        places = [play.script.place(len(play.outcomes)) for play in plays]
        for play, outcome in zip(plays, self.run(batch(items), places), strict=True):
            play.add(outcome)

    def close(self, ends: Sequence[EpisodeEnd], place: Sequence[str] = ()) -> None:
        """Close episodes, in one call.

        Raises:
            CallFailed: `close` failed.
        """
        if self.hooks.close or self.hooks.stateful:
            self.run(CloseBatch(list(ends)), [list(place)] * len(ends))

    def score_group(self, members: Sequence[GroupMember], place: Sequence[str]) -> list[GroupScore]:
        """Score a prompt group.

        Raises:
            CallFailed: `score_group` failed.
        """
        [scores] = self.run(GroupBatch(list(members)), [place])
        return list(scores)

    def play(self, script: Script, batch: BatchOf = StepBatch) -> Play:
        """Play an episode alone, from its reset to its close.

        Raises:
            CallFailed: A call failed; the episode is closed nevertheless.
        """
        [play] = self.begin([script])
        try:
            while not play.ended:
                self.step([play], batch)
        except CallFailed:
            self._close_quietly([play.end("failed")])
            raise
        self.close([play.end()], script.place())
        return play

    def play_together(self, scripts: Sequence[Script]) -> list[Play]:
        """Play episodes side by side: in batches, or, if they belong to the instance, a step of each in turn.

        Raises:
            CallFailed: A call failed; the episodes are closed nevertheless.
        """
        plays: list[Play] = []
        try:
            if self.hooks.stateful:
                for script in scripts:
                    plays += self.begin([script])
            else:
                plays = self.begin(scripts)
            while running := [play for play in plays if not play.ended]:
                for group in [[play] for play in running] if self.hooks.stateful else [running]:
                    self.step(group)
        except CallFailed:
            self._close_quietly([play.end("failed") for play in plays])
            raise
        for play in plays:
            self.close([play.end()], play.script.place())
        return plays

    def _close_quietly(self, ends: Sequence[EpisodeEnd]) -> None:
        for end in ends:
            try:
                self.close([end])
            except CallFailed:
                continue

    async def end(self) -> None:
        """Shut the instance down."""
        await self._executor.close()


class Harness:
    """Maker of a subject's instances, which end with it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._runner = asyncio.Runner()
        self._made: list[Instance] = []

    @classmethod
    @contextmanager
    def open(cls, subject: Subject) -> Iterator[Harness]:
        """A harness, closed at the end."""
        harness = cls(subject)
        try:
            yield harness
        finally:
            harness.close()

    def instance(self) -> Instance:
        """A new instance.

        Raises:
            UnusableEnvironment: It cannot be created.
        """

        async def make() -> tuple[Executor, Any]:
            return self.subject.executor()

        made = Instance(self._runner, *self._runner.run(make()))
        self._made.append(made)
        return made

    def close(self) -> None:
        """Shut all instances down."""
        try:
            for instance in self._made:
                self._runner.run(instance.end())
        finally:
            self._made.clear()
            self._runner.close()


def shown(value: Any, limit: int = SHOWN) -> str:
    """A value on one line, shortened."""
    if isinstance(value, str) and len(value) > limit:
        return f"{one_line(repr(value[:_BEGINNING]), limit)} and so on, {len(value):,} characters"
    return one_line(f"{value:g}" if isinstance(value, float) else repr(value), limit)


def json_text(value: Any, limit: int = SHOWN) -> str:
    """The beginning of a value's JSON, on one line."""
    return one_line(orjson.dumps(value, default=repr).decode(), limit)
