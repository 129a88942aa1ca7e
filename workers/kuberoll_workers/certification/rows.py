"""Rows of a dataset as subjects: their environment is asked for answers, and grades them without a policy."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kuberoll_workers.certification.general import general_trials, leaked
from kuberoll_workers.certification.subjects import Answers
from kuberoll_workers.certification.trials import PROMPT, Outcome, Trial
from kuberoll_workers.certification.verdicts import passes
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.environments.interface import ChatMessage, Episode, Metadata
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome
from kuberoll_workers.environments.runner import EnvironmentRunner

FULL_REWARD: Final = "full_reward"
"""Field of a row's metadata with the reward of a right answer, where it is not its environment's."""

_MOST_TURNS: Final = 50
_DETAIL: Final = 400
_NAME: Final = 200
_episodes = itertools.count(1)


class RowSubject:
    """A row, and the environment that grades it."""

    def __init__(
        self,
        row: Row,
        environment: EnvironmentRunner,
        *,
        label: str,
        digest: str,
        seed: int,
        max_turns: int,
        twins: Sequence[Row] = (),
        own_only: bool = False,
    ) -> None:
        """
        Args:
            seed: Seed of its episodes.
            max_turns: Number of turns after which an episode is truncated.
            twins: Other rows with the same prompt: what is right for them must be right for it.
            own_only: Of wrong answers try only those of the environment, and none at all.
        """
        self._own_only = own_only
        self._twins = twins
        self._row = row
        self._runner = environment
        self._seed = seed
        self._max_turns = max_turns
        self.label = label
        self.digest = digest
        self.environment = row.task_name
        self.idx: object = row.idx
        self.image: str | None = None

    async def answers(self) -> Answers:
        """See `Subject.answers`."""
        episode, state, messages = await self._begin()
        if episode is not None:
            self._runner.end(episode.id, state, "interrupted")
        known = await self._runner.find_trials(self._episode(messages, state))
        metadata = self._row.metadata or {}
        full = metadata.get(FULL_REWARD, known.full_reward)
        solutions = [
            Trial(kind="solution", name=name, responses=responses) for name, responses in known.solutions.items()
        ]
        solutions += await self._of_twins(messages, state)
        attacks = [
            Trial(kind="attack", name=name, responses=responses)
            for name, responses in known.attacks.items()
            if responses not in known.solutions.values()
        ]
        general = [trial for trial in general_trials(messages, known.solutions) if trial.name not in known.attacks]
        if self._own_only:
            general = [trial for trial in general if trial.kind == "nothing"]
        elif (name := leaked(messages, known.solutions)) is not None:
            # It is right, so that it passes is no question: the policy only has to copy it.
            attacks.append(
                Trial(kind="attack", name=f"{PROMPT}'s copy of the solution", responses=known.solutions[name])
            )
        hooks = self._runner.hooks
        unproven = ["the environment scores prompt groups, and one answer is no group"] if hooks.score_group else []
        if self._own_only and not attacks:
            unproven.append("no wrong response with a recorded verdict: that they get less could not be shown")
        return Answers(
            trials=[*solutions, *general, *attacks],
            full_reward=float(full) if isinstance(full, int | float) and not isinstance(full, bool) else None,
            unproven=unproven,
        )

    async def _of_twins(self, messages: Sequence[ChatMessage], state: Metadata) -> list[Trial]:
        """The solutions of other rows with the same prompt that are right for these rows."""
        found = []
        for twin in self._twins:
            known = await self._runner.find_trials(self._episode(messages, {**(state or {}), **(twin.metadata or {})}))
            own = RowSubject(
                twin, self._runner, label=twin.where, digest="", seed=self._seed, max_turns=self._max_turns
            )
            for name, responses in known.solutions.items():
                trial = Trial(kind="solution", name=f"{name} of {twin.where}"[:_NAME], responses=responses)
                reward = (await own.play(trial, 0)).reward
                # One that is broken contradicts its own row, and no other.
                if reward is not None and passes(reward, known.full_reward or 1.0):
                    found.append(trial)
        return found

    async def play(self, trial: Trial, repetition: int) -> Outcome:  # noqa: ARG002 - each is graded alike
        """See `Subject.play`."""
        began = time.perf_counter()
        try:
            reward, detail = await self._played(trial)
        except EnvironmentFault as fault:
            return Outcome(reward=None, problem=str(fault), seconds=time.perf_counter() - began)
        return Outcome(reward=reward, seconds=time.perf_counter() - began, detail=detail)

    async def _played(self, trial: Trial) -> tuple[float, str]:
        """The sum of the rewards, and what the grader said last."""
        episode, state, messages = await self._begin()
        log, reward = list(messages), 0.0
        outcome: StepOutcome | None = None
        before = state or {}
        try:
            for turn in range(min(self._max_turns, max(len(trial.responses), _MOST_TURNS))):
                if turn < len(trial.responses):
                    log.append(dict(trial.responses[turn]))
                elif trial.kind == "solution":
                    break
                else:
                    # Who says no more lets the episode run out.
                    log.append({"role": "assistant", "content": ""})
                name = None if episode is None else episode.id
                outcome = await self._runner.step(log.copy(), state, episode=name)
                reward += outcome.reward
                state = state if outcome.metadata is None else outcome.metadata
                log += map(dict, outcome.observation)
                if outcome.terminated:
                    break
        finally:
            if episode is not None:
                closed = self._runner.end(episode.id, state, "terminated")
                if closed is not None:
                    # What it holds is not the next one's.
                    await closed
        return reward, "" if outcome is None else _detail(outcome, before)

    async def _begin(self) -> tuple[Episode | None, Metadata, Sequence[ChatMessage]]:
        """An open episode, if the environment has such, its state, and the prompt."""
        hooks = await self._runner.find_hooks()
        if not hooks.episodic:
            return None, self._row.metadata, self._row.messages
        episode = self._episode(self._row.messages, self._row.metadata)
        start = await self._runner.begin(episode)
        state = self._row.metadata if start.metadata is None else start.metadata
        return episode, state, [*self._row.messages, *map(dict, start.messages)]

    def _episode(self, messages: Sequence[ChatMessage], state: Metadata) -> Episode:
        return Episode(
            id=f"certify-{next(_episodes)}",
            messages=messages,
            metadata=state,
            seed=self._seed,
            max_turns=self._max_turns,
            tools=self._row.tools,
        )


def _detail(outcome: StepOutcome, before: Mapping[str, object]) -> str:
    """What an environment said of an answer: its observation, and what is new in its state and a text."""
    said = [outcome.content.strip()]
    said += [
        f"{name}: {value}"
        for name, value in (outcome.metadata or {}).items()
        if isinstance(value, str) and before.get(name) != value
    ]
    text = "; ".join(filter(None, said))
    return text if len(text) <= _DETAIL else f"{text[: _DETAIL - 1]}…"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Untried:
    """A row that cannot be tried here."""

    label: str
    digest: str
    environment: str
    idx: object
    reason: str
    image: str | None = None

    async def answers(self) -> Answers:
        """See `Subject.answers`."""
        return Answers(trials=(), unproven=[self.reason])

    async def play(self, trial: Trial, repetition: int) -> Outcome:
        """See `Subject.play`."""
        raise AssertionError(f"{self.reason}: {trial.name} {repetition}")
