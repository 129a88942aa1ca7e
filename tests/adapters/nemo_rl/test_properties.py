"""What holds for any batch: both functions agree, nothing is lost, nothing of the caller's is changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.adapters.nemo_rl import run_async_multi_turn_rollout, run_multi_turn_rollout
from kuberoll_workers.environments import EnvironmentReturn
from tests.adapters.nemo_rl.fakes import CharacterTokenizer, FakePolicy, batch_of, same


def answer(prompt: str, stops: Any) -> str:
    """Depends on the prompt and the stop strings alone, as with a greedy engine."""
    draw = random.Random(repr((prompt, stops)))
    return "".join(chr(draw.randrange(97, 123)) for _ in range(draw.randrange(12)))


class SeededEnvironment:
    """What it answers depends on the log and the state alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        draws = [
            random.Random(repr((self._name, log, state)))
            for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[
                {"role": draw.choice(["environment", "tool"]), "content": self._name * draw.randrange(5)}
                for draw in draws
            ],
            metadata=[None if draw.random() < 0.3 else {"step": draw.random()} for draw in draws],
            next_stop_strings=[draw.choice([None, ["q"], ["x", "y"]]) for draw in draws],
            rewards=torch.tensor([draw.choice([0.0, 0.1, 1.0]) for draw in draws]),
            terminateds=torch.tensor([draw.random() < 0.3 for draw in draws]),
        )


_rows = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from("ab"), st.sampled_from([None, ["s"], []])), min_size=0, max_size=6
)


def made(rows: list[Any]) -> Any:
    return batch_of(
        *[{"step": 0, "row": row, "list": [row]} for row in range(len(rows))],
        prompts=[chr(65 + row) * length for row, (length, _, _) in enumerate(rows)],
        task_name=[task for _, task, _ in rows],
        stop_strings=[stops for _, _, stops in rows],
        own=[[row] for row in range(len(rows))],
    )


@given(rows=_rows, window=st.integers(20, 120), turns=st.integers(0, 5), logprobs=st.booleans(), told=st.booleans())
def test_both_functions_agree(rows: list[Any], window: int, turns: int, logprobs: bool, told: bool) -> None:
    batch = made(rows)
    before = copy.deepcopy(batch)
    finals = []
    for run in (run_multi_turn_rollout, run_async_multi_turn_rollout):
        policy = FakePolicy(answer, logprobs=logprobs, truncated=told, cut=9)
        environments = {name: SeededEnvironment(name) for name in "ab"}
        finals.append(run(policy, batch, CharacterTokenizer(), environments, window, turns))
        assert same(batch, before)
    (lockstep, metrics), (concurrent, again) = finals
    assert same(lockstep, concurrent)
    assert same(metrics, again)
    assert lockstep["own"] == batch["own"]
    for row, log in enumerate(lockstep["message_log"]):
        assert same(log[0], batch["message_log"][row][0])
        tail = log[1:]
        assert [message["role"] == "assistant" for message in tail] == [number % 2 == 0 for number in range(len(tail))]
        assert len(tail) <= 2 * turns
        # Environments answered their own tasks.
        assert {letter for message in tail[1::2] for letter in message["content"]} <= {rows[row][1]}


@given(rows=_rows.filter(bool), window=st.integers(20, 120))
def test_token_counts_add_up(rows: list[Any], window: int) -> None:
    policy = FakePolicy(answer)
    environments = {name: SeededEnvironment(name) for name in "ab"}
    final, metrics = run_multi_turn_rollout(policy, made(rows), CharacterTokenizer(), environments, window, 5)
    counts = {"assistant": 0, "environment": 0}
    turns = 0
    for log in final["message_log"]:
        for number, message in enumerate(log[1:]):
            counts["environment" if number % 2 else "assistant"] += len(message["token_ids"])
        turns += len(log) // 2
    size = len(rows)
    assert metrics["total_turns"] == turns == sum(map(len, policy.calls))
    assert round(metrics["mean_gen_tokens_per_sample"] * size) == counts["assistant"]
    assert round(metrics["mean_env_tokens_per_sample"] * size) == counts["environment"]
    assert round(metrics["mean_total_tokens_per_sample"] * size) == sum(counts.values())
    # Every prompt that was sent is what the sample's messages begin with.
    texts = [
        "".join(chr(token) for message in log for token in message["token_ids"].tolist())
        for log in final["message_log"]
    ]
    assert all(any(text.startswith(prompt) for text in texts) for call in policy.calls for prompt in call)
