"""NeMo RL's actor for NeMo Gym as its callers see it: rows in, checked results out, in any order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch

from kuberoll_workers.adapters.nemo_rl import BatchedDataDict
from tests.adapters.nemo_rl.fakes import ids_of

WINDOW = 64
CONFIG = {
    "max_new_tokens": 16,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": None,
    "stop_strings": None,
    "stop_token_ids": None,
}

Play = Callable[[dict[str, Any], int], dict[str, Any] | Exception]


class Policy:
    """Only its configuration is read."""

    def __init__(self, **config: Any) -> None:
        self.cfg = config or {"vllm_cfg": {"max_model_len": WINDOW}}


class Tokenizer:
    """Thinking tags are one token each: `<` and `>`."""

    pad_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {"<think>": [ord("<")], "</think>": [ord(">")]}.get(text, list(map(ord, text)))


def result(*turns: tuple[str, str], reward: float = 1.0, **full: Any) -> dict[str, Any]:
    """A result as the actor makes it: for each turn what was added to the prompt, and the response."""
    log: list[dict[str, Any]] = []
    for prompt, response in turns:
        log += [
            {"role": "user", "content": "", "token_ids": ids_of(prompt)},
            {
                "role": "assistant",
                "content": "",
                "token_ids": ids_of(response),
                "generation_logprobs": -ids_of(response) / 1000,
                "is_invalid_tool_call": False,
                "has_malformed_thinking": False,
            },
        ]
    output = [
        {"type": "message", "content": [{"type": "output_text", "text": response}], "generation_str": response}
        for _, response in turns
    ]
    return {
        "message_log": log,
        "input_message_log": log[:1],
        "full_result": {"reward": reward, "response": {"output": output}, **full},
    }


class Gym:
    """Plays each row by `play(row, call)`, the number of its attempt; the stream ends with an exception it returns.

    Attributes:
        calls: For each call the numbers of its rows.
        rows: All rows that came, in order.
    """

    def __init__(self, play: Play = lambda row, call: result(("q", "a")), *, last_first: bool = True) -> None:
        self._play = play
        self._last_first = last_first
        self._attempts: dict[int, int] = {}
        self.calls: list[list[int]] = []
        self.rows: list[dict[str, Any]] = []
        self.closed = 0

    async def run_rollouts(
        self, rows: list[dict[str, Any]], timer_prefix: str, deduplicate: bool = False
    ) -> AsyncGenerator[tuple[Any, Any, Any], None]:
        assert deduplicate is False
        self.calls.append([row["_rowidx"] for row in rows])
        self.rows += copy.deepcopy(rows)
        order = list(reversed(rows)) if self._last_first else rows
        try:
            for at, row in enumerate(order):
                await asyncio.sleep(0)
                number = row["_rowidx"]
                self._attempts[number] = self._attempts.get(number, 0) + 1
                played = self._play(row, self._attempts[number])
                if isinstance(played, Exception):
                    raise played
                measured = {f"{timer_prefix}/await_results": 1.0} if at == len(order) - 1 else None
                yield played.pop("_as", number), played, measured
        finally:
            self.closed += 1


def batch_of(count: int, *, agent: str = "math", **columns: Any) -> Any:
    """A batch of NeMo Gym's rows, as NeMo RL's dataset makes them."""
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"question {number}"}]},
            "agent_ref": {"type": "responses_api_agents", "name": agent},
        }
        for number in range(count)
    ]
    return BatchedDataDict[Any](
        {
            "message_log": [[{"role": "user", "content": "", "token_ids": torch.tensor([])}] for _ in range(count)],
            "extra_env_info": rows,
            "loss_multiplier": torch.ones(count),
            "idx": [100 + number for number in range(count)],
            "task_name": ["nemo_gym"] * count,
            **columns,
        }
    )
