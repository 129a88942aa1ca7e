"""Input of the loop: tokenized prompts and their samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kuberoll_workers.data.messages import Message, chat_message, message_of, token_array
from kuberoll_workers.data.record import Partial, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.data.tools import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """A task's row for agent servers of NeMo Gym.

    Attributes:
        fields: As Gym materializes it, without the numbers of a rollout.
        number: Gym's own number of the task; None if the row has none.
        named: True if the row itself names its agent.
    """

    fields: Mapping[str, Any]
    number: int | None
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task, tokenized; shared by all samples of its group and never changed.

    Attributes:
        task_index: Number of the task within the run.
        task_name: The environment that answers it.
        idx: The dataset's own name for the row, any JSON value.
        messages: The prompt's messages. A chat template may put tokens between messages, so only the concatenation of
            their ids is meaningful: it equals `token_ids`.
        token_ids: Ids of the prompt as the policy sees it, including the generation prompt.
        metadata: Initial state of the episode.
        stop_strings: Stop strings of the first turn.
        sampling: Overrides of the job's sampling settings, by their snake_case names.
        row: Position of the dataset's row, such as `file:line`; None if it has none.
        seed: Seed of the task's episodes.
        episode_messages: Number of the last messages that the environment's `reset` added to those of the row.
        tools: Tools that the policy may call; None: none are declared, and responses are not searched for calls.
        episode_tools: True if the environment's `reset` declared them.
        request: The row, if it goes to agent servers of NeMo Gym; else None.
    """

    task_index: int
    task_name: str
    idx: Any
    messages: tuple[Message, ...]
    token_ids: array[int]
    metadata: dict[str, Any] | None
    stop_strings: tuple[str, ...] | None
    sampling: Mapping[str, Any]
    row: str | None = None
    seed: int = 0
    episode_messages: int = 0
    tools: Sequence[Tool] | None = None
    episode_tools: bool = False
    request: AgentRow | None = None


def prompt_messages(messages: Sequence[Mapping[str, Any]], ids: array[int]) -> Iterator[Message]:
    """The prompt's messages; the last one carries the token ids of the whole prompt.

    A template may write tokens between messages, so ids cannot be split by message.
    """
    for number, message in enumerate(messages, start=1):
        yield message_of(message, ids if number == len(messages) else token_array())


def extended(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Tool] | None = None,
) -> Prompt:
    """The prompt with further messages at its end, or other tools, rendered as one chat.

    Args:
        tools: In place of the prompt's; None: the prompt's.

    Raises:
        Exception: The model's chat template rejects the messages; templates raise arbitrary errors.
    """
    chat = [*map(chat_message, prompt.messages), *map(dict, messages)]
    ids = tokenizer.render_chat(chat, tools=prompt.tools if tools is None else tools)
    return replace(
        prompt,
        messages=tuple(prompt_messages(chat, ids)),
        token_ids=ids,
        episode_messages=len(messages),
        tools=prompt.tools if tools is None else tools,
        episode_tools=tools is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory to run.

    Attributes:
        seed: Seed of all random choices of this trajectory; None leaves them to the engine.
        attempt: 0 for the first attempt; increased whenever a failed trajectory is run again.
        partial: Existing turns, after which it continues.
        group_order: `order` of its group.
    """

    prompt: Prompt
    rollout_index: int
    seed: int | None
    attempt: int = 0
    partial: Partial | None = None
    group_order: int | None = None

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.prompt.task_index, self.rollout_index)

    @property
    def episode_id(self) -> str:
        """Name of its episode, and of its session: each attempt has its own."""
        return f"{self.prompt.task_index}-{self.rollout_index}-{self.attempt}"

    @property
    def is_retry(self) -> bool:
        """True if its turns are those of an attempt that has failed."""
        return self.partial is not None and self.partial.turns[-1].attempt < self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Samples of one prompt: a group is complete when enough of them have finished.

    Attributes:
        samples: Samples to run, in this order.
        keep: Number of finished samples that complete the group; if smaller than the number of samples, the first to
            finish are kept and the others dropped.
        decided: True if some of the group are stored already, so the group is kept.
        stored: Reads the stored ones; may read files. Their token ids may be missing.
        order: Number of the group among those of its shard, in the order in which they begin; None: they are not
            numbered.
    """

    samples: tuple[Sample, ...]
    keep: int
    decided: bool = False
    stored: Callable[[], Sequence[TrajectoryRecord]] | None = None
    order: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep <= len(self.samples):
            raise ValueError(f"a group of {len(self.samples)} samples cannot be complete with {self.keep}")
