"""What files for trainers and batches mark for learning, against an engine's own account of what it sampled."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kuberoll.trainer.batch import make_batch
from kuberoll.trainer.groups import Group, GroupKey
from kuberoll_workers.adapters.nemo_rl.conversion import log_of
from kuberoll_workers.analysis.export.formats import FORMATS
from kuberoll_workers.analysis.paths import paths
from kuberoll_workers.data.record import TrajectoryRecord

Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class EngineLog:
    """What an engine sampled: prompt and response of each call, with the log-probabilities."""

    calls: list[Key] = field(default_factory=list)
    logprobs: dict[Key, tuple[float, ...]] = field(default_factory=dict)

    def add(self, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float]) -> None:
        key = tuple(prompt), tuple(response)
        self.calls.append(key)
        self.logprobs[key] = tuple(array("f", logprobs))


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens of a row, and which of them are learned; log-probabilities, where the format has them."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float] | None = None


def _whole(prompt: Any, completion: Any, mask: Any, logprobs: Any) -> Marks:
    return Marks(
        [*prompt, *completion],
        [*[0] * len(prompt), *mask],
        None if logprobs is None else [*[0.0] * len(prompt), *logprobs],
    )


def _slime(row: dict[str, Any]) -> Marks:
    prompt = len(row["tokens"]) - row["response_length"]
    return _whole(row["tokens"][:prompt], row["tokens"][prompt:], row["loss_mask"], row["rollout_log_probs"])


def _nemo_rl(row: dict[str, Any]) -> Marks:
    log = row["message_log"]
    return Marks(
        [token for message in log for token in message["token_ids"]],
        [mark for message in log for mark in message["token_loss_mask"]],
        [value for message in log for value in message["generation_logprobs"]],
    )


READ: dict[str, Callable[[dict[str, Any]], Marks]] = {
    "trl": lambda row: Marks(list(row["input_ids"]), list(row["assistant_masks"])),
    "verl": lambda row: _whole(row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"]),
    "skyrl": lambda row: Marks(list(row["input_ids"]), list(row["loss_mask"])),
    "areal": lambda row: Marks(list(row["input_ids"]), list(row["loss_mask"]), list(row["logprobs"])),
    "prime-rl": lambda row: Marks(list(row["token_ids"]), list(map(int, row["mask"])), list(row["logprobs"])),
    "slime": _slime,
    "nemo-rl": _nemo_rl,
}
"""By format of exact tokens, how its loader reads a row."""


def check_marks(record: TrajectoryRecord, log: EngineLog, decode: Callable[[Sequence[int]], str]) -> None:
    """Check that each format, and a batch, mark what the engine sampled: every response whole, and in one row."""
    rows = [(number, path) for number, path in paths(record) if any(message.sampled for message in path.messages)]
    own = record.messages
    generated = sum(len(message.token_ids) for message in own if message.sampled)
    assert generated == record.tokens.generated
    assert sum(len(message.token_ids) for message in own) == (
        record.tokens.prompt + record.tokens.generated + record.tokens.environment
    )
    for name, read in READ.items():
        learned: Counter[Key] = Counter()
        for number, path in rows:
            learned += _learned(read(FORMATS[name].row(path, "user", number)), log)
        assert learned == Counter(log.calls), name
    learned = Counter()
    for marks in _batch(record):
        learned += _learned(marks, log)
    assert learned == Counter(log.calls), "Batch"
    if record.branches is None:
        assert _learned(_training_step(record), log) == Counter(log.calls)
    # It has a line for the own path alone.
    assert Counter(_gym(record)) == _learned(READ["trl"](FORMATS["trl"].row(record, "user", 0)), log)
    if rows and rows[0][0] == 0:
        assert _gym_texts(record) == [decode(message.token_ids) for message in own if message.sampled]
    for number, path in rows:
        said = [decode(message.token_ids) for message in path.messages if message.sampled]
        for name, texts in _chats(path, number):
            assert texts == said, name


def _learned(marks: Marks, log: EngineLog) -> Counter[Key]:
    """The calls whose responses are what is marked.

    Raises:
        AssertionError: Something else is marked, or has other log-probabilities.
    """
    ids, mask = marks.ids, list(map(int, marks.mask))
    assert len(ids) == len(mask)
    expected = [0] * len(ids)
    found: Counter[Key] = Counter()
    for prompt, response in dict.fromkeys(log.calls):
        begin, end = len(prompt), len(prompt) + len(response)
        if tuple(ids[:begin]) == prompt and tuple(ids[begin:end]) == response and all(mask[begin:end]):
            expected[begin:end] = [1] * len(response)
            found[prompt, response] += 1
            if marks.logprobs is not None:
                assert tuple(array("f", marks.logprobs[begin:end])) == log.logprobs[prompt, response]
    assert mask == expected
    return found


def _batch(record: TrajectoryRecord) -> Iterator[Marks]:
    group = Group(key=GroupKey(record.task_index, 0), task_name=record.task_name, wanted=1, trajectories=(record,))
    batch = make_batch([group], advantages=None, pad_id=0)
    assert not np.isnan(batch.logprobs).any()
    assert not batch.logprobs[~batch.loss_mask].any()
    for ids, mask, logprobs, length in zip(
        batch.input_ids, batch.loss_mask, batch.logprobs, batch.lengths, strict=True
    ):
        assert not mask[length:].any()
        if mask.any():
            yield Marks(ids[:length].tolist(), mask[:length].tolist(), logprobs[:length].tolist())


def _training_step(record: TrajectoryRecord) -> Marks:
    """As NeMo RL's training steps mark the message log of a rollout: by the role."""
    prompt = [message for message in record.messages if message.turn == 0]
    given = [{"role": "user", "token_ids": list(message.token_ids)} for message in prompt]
    log = log_of(given, record.messages, with_logprobs=True)
    ids = [list(map(int, message["token_ids"])) for message in log]
    return Marks(
        [token for part in ids for token in part],
        [int(message["role"] == "assistant") for message, part in zip(log, ids, strict=True) for _ in part],
    )


def _gym(record: TrajectoryRecord) -> Iterator[Key]:
    row = FORMATS["nemo-gym"].row(record, "user", 0)
    for item in row["response"]["output"]:
        if item.get("generation_token_ids"):
            yield tuple(item["prompt_token_ids"]), tuple(item["generation_token_ids"])


def _gym_texts(record: TrajectoryRecord) -> list[str]:
    items = FORMATS["nemo-gym"].row(record, "user", 0)["response"]["output"]
    said = [item["content"] for item in items if item.get("role") == "assistant"]
    return [content if isinstance(content, str) else content[0]["text"] for content in said]


def _chats(path: TrajectoryRecord, number: int) -> Iterator[tuple[str, list[str]]]:
    """By format, the assistant's texts that a loader of its chats learns; after the prompt, where it has no marks."""
    made = {name: FORMATS[name].row(path, "user", number) for name in ("openai-chat", "sharegpt", *READ)}
    prompt = sum(message.turn == 0 for message in path.messages)
    yield (
        "openai-chat",
        [
            message["content"]
            for message in made["openai-chat"]["messages"]
            if message["role"] == "assistant" and message.get("weight") != 0
        ],
    )
    turns = made["sharegpt"]["conversations"]
    count = sum(message.sampled for message in path.messages)
    yield "sharegpt", [turn["value"] for turn in turns if turn["from"] == "gpt"][-count:]
    yield (
        "nemo-rl",
        [
            message["content"]
            for message, mark in zip(made["nemo-rl"]["messages"], made["nemo-rl"]["message_loss_mask"], strict=True)
            if mark
        ],
    )
    for name, messages in (
        ("trl", made["trl"]["completion"]),
        ("verl", made["verl"]["messages"][prompt:]),
        ("prime-rl", made["prime-rl"]["messages"][prompt:]),
    ):
        yield name, [message["content"] for message in messages if message["role"] == "assistant"]
