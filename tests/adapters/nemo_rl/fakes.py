"""A policy, a tokenizer, environments and batches as users of NeMo RL have them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from kuberoll_workers.adapters.nemo_rl import BatchedDataDict, RolloutLimits
from kuberoll_workers.environments import EnvironmentReturn

PAD = 0
FAST = RolloutLimits(backoff_seconds=0.0)

Answer = Callable[[str, Any], str | Exception]


class Encoded(dict[str, Any]):
    """What a tokenizer returns: a mapping that has attributes, too."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class CharacterTokenizer:
    """One token for each character; nothing is asked of it but what NeMo RL asks."""

    pad_token_id = PAD

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> Encoded:
        assert (return_tensors, add_special_tokens) == ("pt", False)
        # Floats for an empty text, as the real ones return.
        return Encoded(input_ids=torch.tensor([[ord(character) for character in text]]))

    def batch_decode(self, batch: Sequence[torch.Tensor], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(token) for token in ids.tolist()) for ids in batch]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([ord(character) for character in text], dtype=torch.int64)


class FakePolicy:
    """Answers each prompt by `answer(prompt, stop_strings)`, in both of the interface's ways.

    Attributes:
        calls: The batches of `generate`: for each row its prompt.
        stops: The stop strings of each row that was asked for, in order.
        change: Called with each output before it is returned, for outputs that are wrong.
    """

    def __init__(
        self,
        answer: Answer = lambda prompt, stops: "x",
        *,
        logprobs: bool = True,
        truncated: bool = False,
        cut: int | None = None,
        change: Callable[[dict[str, Any]], Any] = lambda output: output,
    ) -> None:
        self._answer = answer
        self._logprobs = logprobs
        self._truncated = truncated
        self._cut = cut
        self.change = change
        self.calls: list[list[str]] = []
        self.stops: list[Any] = []
        self.greedy: list[bool] = []
        self.threads: set[int] = set()

    def generate(self, data: Any, greedy: bool = False) -> Any:
        self._seen(data, greedy)
        return self._output(data)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        self._seen(data, greedy)
        for row in reversed(range(len(data["input_ids"]))):
            await asyncio.sleep(0)
            yield row, self._output(data.select_indices([row]))

    def _seen(self, data: Any, greedy: bool) -> None:
        assert data["input_ids"].dtype is torch.int64
        self.threads.add(threading.get_ident())
        self.calls.append(self._prompts(data))
        self.stops.extend(data["stop_strings"])
        self.greedy.append(greedy)

    def _prompts(self, data: Any) -> list[str]:
        pairs = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        for ids, length in zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True):
            assert all(token == PAD for token in ids[length:])
        return [text_of(ids[:length]) for ids, length in pairs]

    def _output(self, data: Any) -> Any:
        rows, lengths, logprobs, truncated = [], [], [], []
        for prompt, stops in zip(self._prompts(data), data["stop_strings"], strict=True):
            answer = self._answer(prompt, stops)
            if isinstance(answer, Exception):
                raise answer
            kept = answer[: self._cut]
            rows.append(ids_of(prompt + kept))
            lengths.append(len(kept))
            # Different ones, so that a slice in the wrong place is seen.
            logprobs.append(torch.cat([torch.zeros(len(prompt)), -ids_of(kept) / 1000]))
            truncated.append(len(kept) < len(answer))
        output: dict[str, Any] = {
            "output_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD),
            "generation_lengths": torch.tensor(lengths),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
        }
        if self._logprobs:
            output["logprobs"] = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
        if self._truncated:
            output["truncated"] = torch.tensor(truncated)
        changed = self.change(output)
        return BatchedDataDict(changed) if isinstance(changed, dict) else changed


class CountingEnvironment:
    """Ends after `turns` steps, each worth `reward`; what else it does, each episode's metadata says."""

    def __init__(self, observation: str = "obs") -> None:
        self.observation = observation
        self.batches: list[int] = []
        self.logs: list[Any] = []

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.batches.append(len(message_log_batch))
        self.logs.extend(message_log_batch)
        left = [state["turns"] - 1 for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": state.get("say", self.observation)} for state in metadata],
            metadata=[{**state, "turns": turns} for state, turns in zip(metadata, left, strict=True)],
            next_stop_strings=[state.get("stops") for state in metadata],
            rewards=torch.tensor([state.get("reward", 1.0) for state in metadata]),
            terminateds=torch.tensor([turns <= 0 for turns in left]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def batch_of(*states: dict[str, Any], prompts: Sequence[str] | None = None, **columns: Any) -> Any:
    """A batch of one sample for each state; further columns as given."""
    texts = [f"prompt {row}" for row in range(len(states))] if prompts is None else prompts
    return BatchedDataDict[Any](
        {
            "message_log": [[{"role": "user", "content": text, "token_ids": ids_of(text)}] for text in texts],
            "extra_env_info": list(states),
            "task_name": ["env"] * len(states),
            "loss_multiplier": torch.ones(len(states)),
            "idx": [100 + row for row in range(len(states))],
            **columns,
        }
    )


def contents(log: Sequence[Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in log]


def same(one: Any, other: Any) -> bool:
    """Deep equality, tensors included."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(torch.nan_to_num(one, nan=-7.0), torch.nan_to_num(other, nan=-7.0))
        )
    if isinstance(one, dict | BatchedDataDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    return bool(one == other) or (one != one and other != other)
