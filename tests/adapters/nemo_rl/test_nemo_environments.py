"""A calculator and a puzzle as NeMo RL has them, in Ray actors, with a real model's tokenizer and chat template."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import (
    BatchedDataDict,
    batched_message_log_to_flat_message,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from tests.adapters.nemo_rl.fakes import FAST, FakePolicy, contents, same
from tests.adapters.nemo_rl.nemo_environments import (
    CALL,
    CalculatorState,
    MultiStepCalculator,
    PuzzleState,
    SlidingPuzzle,
)

FACES = pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
TINY = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny-policy"
TASKS = ["calculator", "puzzle", "calculator", "puzzle"]
END = "<|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def actors(ray: Any) -> dict[str, Any]:
    made = {"calculator": MultiStepCalculator, "puzzle": SlidingPuzzle}
    return {name: ray.remote(kind).options(num_cpus=0).remote() for name, kind in made.items()}


class Player(FakePolicy):
    """Reads prompts and writes answers by the real tokenizer, as an engine does; ends with the end token."""

    def __init__(self, tokenizer: Any, **more: Any) -> None:
        super().__init__(self._play, **more)
        self._tokenizer = tokenizer
        self.prompts: list[list[int]] = []

    def _play(self, prompt: str, stops: Any) -> str:
        if "calculate" in prompt:
            assert stops == [CALL]
            calls = ("[5, 3, sum]", "[8, 2, prod]") if "5 + 3" in prompt else ("[1, 9, prod]", "[9, 2, sum]")
            results = prompt.count("<result>")
            return calls[results] + CALL if results < 2 else prompt.rpartition("<result>")[2].partition("<")[0] + END
        assert stops == ["</action>"]
        replies = ("hm", "I try <action>up</action>", "<action>left</action>", "<action>left</action>")
        return replies[prompt.count("<environment>")]

    def _prompts(self, data: Any) -> list[str]:
        rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        prompts = [ids[:length] for ids, length in rows]
        self.prompts.extend(prompts)
        return [self._tokenizer.decode(ids) for ids in prompts]

    def _output(self, data: Any) -> Any:
        rows = []
        pairs = zip(data["input_ids"], data["input_lengths"].tolist(), data["stop_strings"], strict=True)
        for ids, length, stops in pairs:
            answer = self._play(self._tokenizer.decode(ids[:length]), stops)
            rows.append(torch.cat([ids[:length], _ids(self._tokenizer, answer)]))
        pad = self._tokenizer.pad_token_id
        return BatchedDataDict(
            {
                "output_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad),
                "generation_lengths": torch.tensor([len(row) for row in rows]) - data["input_lengths"],
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
                "logprobs": torch.full((len(rows), max(map(len, rows))), -0.5),
            }
        )


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return ids


def batch_of(tokenizer: Any) -> Any:
    texts = ["calculate (5 + 3) * 2", "solve 1 2/0 3", "calculate (1 * 9) + 2", "solve 0 2/1 3"]
    states: Sequence[Any] = [
        CalculatorState(problem="", expected_final_answer=16.0, max_steps=5, current_step=0),
        PuzzleState(grid=[[1, 2], [0, 3]], num_moves=0, max_moves=10),
        CalculatorState(problem="", expected_final_answer=11.0, max_steps=5, current_step=0),
        PuzzleState(grid=[[0, 2], [1, 3]], num_moves=0, max_moves=1),
    ]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    return BatchedDataDict[Any](
        {
            "message_log": [
                [{"role": "user", "content": text, "token_ids": _ids(tokenizer, text)}] for text in prompts
            ],
            "extra_env_info": list(states),
            "loss_multiplier": [1.0] * 4,
            "idx": [7, 8, 9, 10],
            "task_name": TASKS,
            # One text is one stop string.
            "stop_strings": [[CALL], "</action>", [CALL], "</action>"],
        }
    )


@FACES
def test_both_games_in_one_batch(run: Any, actors: Any, tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    before = copy.deepcopy(batch)
    policy = Player(tokenizer)
    final, metrics = run(policy, batch, tokenizer, actors, 1024, 6, limits=FAST)
    assert same(batch, before)
    assert final["failure"] == [None] * 4
    assert final["task_name"] == TASKS
    assert final["idx"] == [7, 8, 9, 10]
    assert final["total_reward"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert final["stop_reason"] == ["terminated"] * 4
    assert metrics["total_turns"] == 3 + 3 + 3 + 3
    assert contents(final["message_log"][0])[1:] == [
        ("assistant", f"[5, 3, sum]{CALL}"), ("environment", "<result>8.00000</result>"),
        ("assistant", f"[8, 2, prod]{CALL}"), ("environment", "<result>16.00000</result>"),
        ("assistant", "16.00000"), ("environment", "right"),
    ]  # fmt: skip
    assert contents(final["message_log"][1])[1:] == [
        ("assistant", "hm"), ("environment", "<environment>1 2/0 3</environment>\n"),
        ("assistant", "I try <action>up</action>"), ("environment", "<environment>1 2/0 3</environment>\n"),
        ("assistant", "<action>left</action>"), ("environment", "<environment>solved</environment>\n"),
    ]  # fmt: skip
    # None keeps the old state: a reply without a move does not count, and an ended episode's last state stays.
    assert [state.get("current_step", state.get("num_moves")) for state in final["extra_env_info"]] == [2, 1, 2, 1]
    # Every prompt that was sent is what its sample's messages begin with, id by id.
    flat, lengths = batched_message_log_to_flat_message(final["message_log"])
    ids = [row[:length] for row, length in zip(flat["token_ids"].tolist(), lengths.tolist(), strict=True)]
    assert all(any(row[: len(prompt)] == prompt for row in ids) for prompt in policy.prompts)
    for log in final["message_log"]:
        for message in log[1:]:
            ended = END if message["content"] == "16.00000" or message["content"] == "11.00000" else ""
            assert torch.equal(message["token_ids"], _ids(tokenizer, message["content"] + ended))
            assert ("generation_logprobs" in message) == (message["role"] == "assistant")


def test_both_functions_make_the_same_of_it(actors: Any, tokenizer: Any) -> None:
    runs = (run_multi_turn_rollout, run_async_multi_turn_rollout)
    lockstep, concurrent = (run(Player(tokenizer), batch_of(tokenizer), tokenizer, actors, 1024, 6) for run in runs)
    assert same(lockstep[0], concurrent[0])
    assert same(lockstep[1], concurrent[1])


@FACES
def test_the_window_is_kept_with_a_real_tokenizer(run: Any, actors: Any, tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    longest = max(len(log[0]["token_ids"]) for log in batch["message_log"])
    for window in range(longest, longest + 40, 5):
        final, metrics = run(Player(tokenizer), batch, tokenizer, actors, window, 6, limits=FAST)
        _, lengths = batched_message_log_to_flat_message(final["message_log"])
        # A response that the policy wrote beyond the window is kept whole; nothing follows it.
        for length, log in zip(lengths.tolist(), final["message_log"], strict=True):
            assert length <= window or len(log[-1]["token_ids"]) == 0
        assert metrics["truncation_rate"] == final["truncated"].float().mean()


def test_the_environments_own_metrics_are_theirs_to_ask_for(actors: Any, tokenizer: Any) -> None:
    import ray

    final, _ = run_multi_turn_rollout(Player(tokenizer), batch_of(tokenizer), tokenizer, actors, 1024, 6)
    rates = [
        ray.get(actors[name].global_post_process_and_metrics.remote(final.select_indices(rows)))[1]["success_rate"]
        for name, rows in (("calculator", [0, 2]), ("puzzle", [1, 3]))
    ]
    assert rates == [1.0, 0.5]
