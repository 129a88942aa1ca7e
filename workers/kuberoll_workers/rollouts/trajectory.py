"""One trajectory: its messages, context and counts, changed only through its own methods."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy

from kuberoll_workers.data.messages import (
    LOGPROB_TYPE,
    TRUNCATED,
    ExtendedMessage,
    Message,
    chat_message,
    message_of,
    token_array,
)
from kuberoll_workers.data.prompt_digest import prompt_digest
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import (
    Branch,
    DroppedRecord,
    FailureRecord,
    Partial,
    Timing,
    TokenCounts,
    TrajectoryRecord,
    TurnRecord,
)
from kuberoll_workers.data.sampling import Distribution, distribution_of, listed
from kuberoll_workers.data.stop_reasons import DropReason, StopReason, by_environment
from kuberoll_workers.data.thoughts import unfinished
from kuberoll_workers.environments.interface import ChatMessage, GroupScore, Metadata
from kuberoll_workers.environments.outcome import StepOutcome, check_reward
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.rollouts import rules
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.rewards import Scored, scored
from kuberoll_workers.rollouts.seeds import turn_seed
from kuberoll_workers.rollouts.settings import RolloutSettings, sampling_of

# A plain float: compared with NumPy's, a sum is first cast to float32, with a warning if it does not fit.
_FLOAT32_MAX = float(numpy.finfo(numpy.float32).max)


class PrefixBroken(Exception):
    """A trajectory's context is not the concatenation of its messages: sampled tokens were changed."""


def _rewards_fit_float32(partial: Partial) -> bool:
    """True if the running reward of a partial fits float32; older versions did not check that."""
    total = 0.0
    for turn in partial.turns:
        total += turn.reward
        if not abs(total) < _FLOAT32_MAX:
            return False
    return True


class Trajectory:
    """A trajectory from its prompt to its end; it shares no mutable state with another one.

    Attributes:
        context: All token ids so far, which are the next prompt. It is only appended to, so the policy sees exactly
            what was sampled, and a turn costs no more than its new tokens.
        chat: The messages as environments see them, one for each of `messages`: role, content and further fields.
        group_score: Its score within its prompt group; None: it has none.
        branches, continuity: As in `TrajectoryRecord`.
        distributions: Of each response, if it is an agent's; None: all are of the sample's.
        thinks: Its newest response is thoughts that never end.
        stop_reason: Why it ended; None while it runs.
    """

    __slots__ = (
        "_reencoded",
        "_response_truncated",
        "_sampling",
        "_settings",
        "_turn_ends",
        "answer",
        "branches",
        "chat",
        "context",
        "continuity",
        "distributions",
        "ended_at",
        "environment_seconds",
        "environment_tokens",
        "generated_tokens",
        "generation_seconds",
        "group_score",
        "messages",
        "metadata",
        "reward_parts",
        "rewards",
        "sample",
        "stop_reason",
        "stop_strings",
        "thinks",
        "total_reward",
        "turn",
    )

    def __init__(self, sample: Sample, settings: RolloutSettings) -> None:
        prompt = sample.prompt
        self.sample = sample
        self.messages: list[Message] = list(prompt.messages)
        self.chat: list[ChatMessage] = [chat_message(message) for message in prompt.messages]
        self.context: array[int] = prompt.token_ids[:]
        self.metadata: Metadata = copy.deepcopy(prompt.metadata)
        self._settings = settings
        self._sampling = sampling_of(settings.sampling, prompt.sampling)
        first = prompt.stop_strings if prompt.stop_strings is not None else self._sampling.stop
        self.stop_strings: tuple[str, ...] | None = first
        self.turn = 0
        self.generated_tokens = 0
        self.environment_tokens = 0
        self.rewards: list[float] = []
        self.reward_parts: dict[str, list[float]] = {}
        self.total_reward = numpy.float32(0)
        self.generation_seconds: list[float] = []
        self.environment_seconds: list[float] = []
        self.ended_at: list[float | None] = []
        self.answer: str | None = None
        self.group_score: GroupScore | None = None
        self.branches: list[Branch] | None = None
        self.continuity: dict[str, int] | None = None
        self.distributions: Sequence[Distribution | None] | None = None
        self.thinks = self._response_truncated = False
        # One entry per turn.
        self._reencoded: list[bool] = []
        # Number of messages at the end of each complete turn.
        self._turn_ends: list[int] = []
        self.stop_reason: StopReason | None = None
        if rules.prompt_fills_window(len(self.context), settings.max_sequence_length):
            self.stop_reason = "truncated"
        elif (
            sample.partial is not None
            and sample.partial.turns[0].prompt == self.beginning()
            and _rewards_fit_float32(sample.partial)
        ):
            for turn in sample.partial.turns:
                self._replay(turn)

    def beginning(self) -> str:
        """Digest of its prompt, its sampling, and what else its tokens depend on."""
        return prompt_digest(
            self._settings.rendering, msgspec.json.encode(self._sampling), self.sample.prompt.token_ids
        )

    def _replay(self, turn: TurnRecord) -> None:
        """Append a stored turn, by the same rules as a new one."""
        response, *observation = turn.messages
        if turn.turn != self.turn + 1 or self.stop_reason is not None:
            raise ValueError(f"trajectory {tuple(self.sample.key)}: turn {turn.turn} does not follow turn {self.turn}")
        self.add_response(
            GenerationResult(
                token_ids=token_array(response.token_ids),
                logprobs=array(LOGPROB_TYPE, response.logprobs or ()),
                finish_reason="length" if response.truncated else "stop",
                policy_versions=tuple(response.policy_versions or ()),
                exact=turn.token_source == "engine",
            ),
            response.content,
            turn.generation_seconds,
            fields=response.fields if isinstance(response, ExtendedMessage) else {},
        )
        if not turn.is_complete:
            if turn.metadata is not None:
                self.metadata = turn.metadata
            return
        self.add_step(
            StepOutcome(
                role=observation[-1].role,
                content=observation[-1].content,
                metadata=turn.metadata,
                stop_strings=None if turn.stop_strings is None else tuple(turn.stop_strings),
                reward=turn.reward,
                terminated=by_environment(turn.stop_reason),
                reward_parts=turn.reward_parts,
                answer=turn.answer,
                messages=tuple(map(chat_message, observation)),
            ),
            token_array(itertools.chain.from_iterable(message.token_ids for message in observation)),
            turn.environment_seconds,
            ended_at=turn.ended_at,
        )
        # What was cut off of the observation is not stored.
        self.messages[-1].truncated = observation[-1].truncated
        if turn.stop_reason is not None:
            self.stop_reason = turn.stop_reason

    @property
    def complete_turns(self) -> int:
        """Number of complete turns."""
        return len(self.rewards)

    @property
    def awaits_step(self) -> bool:
        """True if the environment has not taken the newest response yet."""
        return self.turn > len(self.rewards)

    def episode_messages(self) -> list[dict[str, str]]:
        """Messages that the environment's `reset` added to the prompt."""
        messages = self.sample.prompt.messages
        added = messages[len(messages) - self.sample.prompt.episode_messages :]
        return [{"role": message.role, "content": message.content} for message in added]

    @property
    def task_name(self) -> str:
        return self.sample.prompt.task_name

    def next_request(self, attempt: int) -> GenerationRequest:
        """The generation request of the next turn; `attempt` counts from 0."""
        sample, base = self.sample, self._sampling
        turn = self.turn + 1
        session = sample.episode_id
        return GenerationRequest(
            request_id=f"{session}-{turn}-{attempt}",
            session_id=session,
            token_ids=self.context,
            sampling=msgspec.structs.replace(
                base,
                max_tokens=rules.generation_room(
                    len(self.context), base.max_tokens, self._settings.max_sequence_length
                ),
                # The same seed for every attempt: a retry repeats the turn.
                seed=None if sample.seed is None else turn_seed(sample.seed, turn),
                stop=self.stop_strings or (),
            ),
            tools=sample.prompt.tools if self._settings.engine_parses_calls and sample.prompt.tools else None,
        )

    def add_response(
        self, result: GenerationResult, text: str, seconds: float, *, fields: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Append the policy's response of this turn, and the seconds that it took.

        Args:
            fields: Further fields of its chat message, such as `tool_calls`.
        """
        self.turn += 1
        self._response_truncated = result.finish_reason == "length"
        chat: ChatMessage = {"role": "assistant", "content": text, **fields}
        message = message_of(chat, result.token_ids, turn=self.turn, truncated=self._response_truncated)
        message.logprobs = result.logprobs if len(result.logprobs) == len(result.token_ids) else None
        message.policy_versions = result.policy_versions or None
        message.sampled = True
        if self._response_truncated:
            chat[TRUNCATED] = True
        self.messages.append(message)
        self.chat.append(chat)
        self.thinks = unfinished(chat)
        self.context.extend(result.token_ids)
        self.generated_tokens += len(result.token_ids)
        self.generation_seconds.append(seconds)
        self._reencoded.append(not result.exact)

    def add_step(
        self, outcome: StepOutcome, observation: array[int], seconds: float, *, ended_at: float | None = None
    ) -> None:
        """Append the environment's observation and reward of this turn; sets `stop_reason` if the trajectory ends.

        Args:
            observation: Token ids of the outcome's messages, not yet truncated to the window.
            seconds: Wall seconds of the step.
            ended_at: Unix time of its end; None if unknown.
        """
        kept, context_truncated = rules.observation_room(
            len(self.context), 0, len(observation), self._settings.max_sequence_length
        )
        ids = observation if kept == len(observation) else observation[:kept]
        # A template may group messages, so that their ids cannot be told apart: the last one carries them all.
        *others, last = chats = outcome.observation
        if others:
            self.messages += [message_of(chat, token_array(), turn=self.turn) for chat in others]
        self.messages.append(message_of(last, ids, turn=self.turn, truncated=kept < len(observation)))
        self.chat += chats
        self._turn_ends.append(len(self.messages))
        self.context.extend(ids)
        self.environment_tokens += len(ids)
        self.environment_seconds.append(seconds)
        self.ended_at.append(ended_at)
        self._add_reward(outcome)
        if outcome.answer is not None:
            self.answer = outcome.answer
        if outcome.metadata is not None:
            self.metadata = outcome.metadata
        self.stop_strings = outcome.stop_strings
        self.stop_reason = rules.stop_reason(
            terminated=outcome.terminated,
            response_truncated=self._response_truncated,
            context_truncated=context_truncated,
            turns=self.turn,
            max_turns=self._settings.max_turns,
        )

    def continues_after(self, outcome: StepOutcome) -> bool:
        """True if the policy responds to this outcome's observation, provided the window has room."""
        over = outcome.terminated or self._response_truncated or self.turn >= self._settings.max_turns
        return not over

    def check_step(self, outcome: StepOutcome) -> None:
        """Check that the total reward with this turn's fits float32.

        Raises:
            StepInvalid: It does not.
        """
        total = float(self.total_reward) + outcome.reward
        # Far from the limit the rounding of float32 makes no difference.
        if not -1e38 < total < 1e38:
            total = float(self.total_reward) + float(numpy.float32(outcome.reward))
            check_reward(total, f"the sum of the rewards of {self.turn} turns")

    def score(self, score: GroupScore) -> None:
        """Set its score within its prompt group, once it has ended.

        Raises:
            StepInvalid: The total reward does not fit float32 with it.
        """
        scored(self.total_reward, self.metadata, score)
        self.group_score = score

    def _scored(self) -> Scored:
        score = self.group_score
        if score is None:
            return Scored(float(self.total_reward), self.metadata)
        return scored(self.total_reward, self.metadata, score)

    def _add_reward(self, outcome: StepOutcome) -> None:
        self.rewards.append(outcome.reward)
        # float32, as trainers sum rewards.
        self.total_reward += numpy.float32(outcome.reward)
        for name in dict.fromkeys((*self.reward_parts, *outcome.reward_parts)):
            # A part that a turn does not name is 0 in that turn.
            values = self.reward_parts.setdefault(name, [0.0] * (self.turn - 1))
            values.append(outcome.reward_parts.get(name, 0.0))

    def check_prefix(self) -> None:
        """Check that the context has as many tokens as were sent and sampled so far; makes no copy.

        Raises:
            PrefixBroken: It has not.
        """
        parts = len(self.sample.prompt.token_ids) + self.generated_tokens + self.environment_tokens
        if len(self.context) != parts:
            raise PrefixBroken(
                f"the context of turn {self.turn + 1} has {len(self.context)} tokens where its messages have {parts}"
            )

    def check_tokens(self) -> None:
        """Check, once the trajectory has ended, that its context is the concatenation of its messages' tokens.

        Raises:
            PrefixBroken: It is not; the message names the first message that differs.
        """
        at = len(self.sample.prompt.token_ids)
        if self.context[:at] != self.sample.prompt.token_ids:
            raise PrefixBroken("the context does not begin with the prompt")
        for number, message in enumerate(self.messages[len(self.sample.prompt.messages) :]):
            end = at + len(message.token_ids)
            if self.context[at:end] != message.token_ids:
                raise PrefixBroken(f"the context does not hold the tokens of message {number} after the prompt")
            at = end

    def turn_messages(self, index: int) -> range:
        """Numbers of the messages of a complete turn, which is counted from 0: the response, and the observation."""
        ends = self._turn_ends
        return range(ends[index - 1] if index else len(self.sample.prompt.messages), ends[index])

    def turn_record(self) -> TurnRecord:
        """The newest complete turn as it is journaled."""
        return self._turn_record(self.complete_turns - 1, newest=True)

    def partial(self) -> Partial | None:
        """The complete turns so far; None if there are none."""
        complete = self.complete_turns
        turns = [self._turn_record(index, newest=index == complete - 1) for index in range(complete)]
        return Partial(turns) if turns else None

    def turns_to_score(self) -> list[TurnRecord]:
        """All turns, with that whose response waits for the environment."""
        found = self.partial()
        turns = [] if found is None else found.turns
        return [*turns, self._turn_record(len(turns), newest=True)] if self.awaits_step else turns

    def _turn_record(self, index: int, *, newest: bool) -> TurnRecord:
        """One turn; the one after the last complete one has its response only."""
        complete = index < len(self.rewards)
        messages = self.turn_messages(index) if complete else slice(-1, None)
        prompt = self.sample.prompt
        return TurnRecord(
            task_index=self.sample.prompt.task_index,
            rollout_index=self.sample.rollout_index,
            attempt=self.sample.attempt,
            turn=index + 1,
            messages=self.messages[messages.start : messages.stop],
            reward=self.rewards[index] if complete else 0.0,
            reward_parts={name: values[index] for name, values in self.reward_parts.items()} if complete else {},
            # Resuming needs both from the newest turn only: None keeps the old state and clears the stop strings.
            metadata=self.metadata if newest else None,
            stop_strings=list(self.stop_strings) if newest and self.stop_strings else None,
            answer=self.answer if newest else None,
            generation_seconds=self.generation_seconds[index],
            environment_seconds=self.environment_seconds[index] if complete else 0.0,
            stop_reason=self.stop_reason if newest else None,
            ended_at=self.ended_at[index] if complete else None,
            prompt=self.beginning() if index == 0 else None,
            prompt_messages=(self.episode_messages() or None) if index == 0 else None,
            token_source="reencoded" if self._reencoded[index] else "engine",
            tools=list(prompt.tools or ()) if index == 0 and prompt.episode_tools else None,
        )

    def record(self) -> TrajectoryRecord:
        """The record of a finished trajectory.

        Raises:
            RuntimeError: It has not ended.
        """
        if self.stop_reason is None:
            raise RuntimeError("the trajectory has not ended")
        prompt, final = self.sample.prompt, self._scored()
        return TrajectoryRecord(
            task_index=prompt.task_index,
            rollout_index=self.sample.rollout_index,
            task_name=prompt.task_name,
            idx=prompt.idx,
            messages=self.messages,
            total_reward=final.total_reward,
            rewards=self.rewards,
            reward_parts=self.reward_parts,
            answer=self.answer,
            stop_reason=self.stop_reason,
            turn_count=self.turn,
            tokens=TokenCounts(
                prompt=len(prompt.token_ids), generated=self.generated_tokens, environment=self.environment_tokens
            ),
            timing=Timing(
                generation_seconds=self.generation_seconds,
                environment_seconds=self.environment_seconds,
                ended_at=self.ended_at,
            ),
            metadata=final.metadata,
            seed=self.sample.seed,
            attempt=self.sample.attempt,
            group_reward=final.group_reward,
            token_source="reencoded" if any(self._reencoded) else "engine",
            tools=list(prompt.tools) if prompt.tools else None,
            branches=self.branches,
            continuity=self.continuity,
            group_order=self.sample.group_order,
            sampling=self._stored_sampling(),
        )

    def _stored_sampling(self) -> list[dict[str, Any] | None] | None:
        usual = self._settings.usual
        if self.distributions is not None:
            return listed(self.distributions, usual)
        if self._settings.foreign_policy:
            # It samples as its own configuration says.
            return None
        return listed([distribution_of(self._sampling)] * self.turn, usual)

    def dropped_record(self, reason: DropReason) -> DroppedRecord:
        """The record of a dropped trajectory: its complete turns."""
        prompt, final = self.sample.prompt, self._scored()
        complete = self.complete_turns
        first = len(prompt.messages)
        messages = self.messages[: self._turn_ends[-1] if complete else first]
        responses = {self.turn_messages(index).start for index in range(complete)}
        counts = {"assistant": 0, "environment": 0}
        for number, message in enumerate(messages[first:], start=first):
            counts["assistant" if number in responses else "environment"] += len(message.token_ids)
        return DroppedRecord(
            task_index=prompt.task_index,
            rollout_index=self.sample.rollout_index,
            task_name=prompt.task_name,
            idx=prompt.idx,
            reason=reason,
            stop_reason=self.stop_reason,
            turn_count=complete,
            total_reward=final.total_reward,
            rewards=self.rewards,
            tokens=TokenCounts(
                prompt=len(prompt.token_ids), generated=counts["assistant"], environment=counts["environment"]
            ),
            messages=messages,
            metadata=final.metadata,
            seed=self.sample.seed,
            attempt=self.sample.attempt,
            group_reward=final.group_reward,
            group_order=self.sample.group_order,
        )

    def failure_record(self, failure: TrajectoryFailed) -> FailureRecord:
        """The record of a trajectory that failed permanently."""
        prompt = self.sample.prompt
        return FailureRecord(
            task_index=prompt.task_index,
            rollout_index=self.sample.rollout_index,
            task_name=prompt.task_name,
            idx=prompt.idx,
            kind=failure.kind,
            reason=failure.cause.reason,
            evidence=failure.cause.evidence.as_json(),
            stage=failure.stage,
            cause=str(failure),
            tries=failure.tries,
            attempt=self.sample.attempt,
            turn_count=self.turn,
            seed=self.sample.seed,
            tokens=self.generated_tokens,
            messages=self.messages,
            metadata=self.metadata,
            row=prompt.row,
            frames=None if failure.traceback is None else list(failure.traceback.frames),
            traceback=None if failure.traceback is None else failure.traceback.text,
            group_order=self.sample.group_order,
        )
