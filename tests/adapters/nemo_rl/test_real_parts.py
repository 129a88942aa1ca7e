"""Environments in real Ray actors, and a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import run_async_multi_turn_rollout, run_multi_turn_rollout
from kuberoll_workers.adapters.nemo_rl.tokenizers import ForeignTokenizer, decode_all, pad_token_of, tokenizer_of
from tests.adapters.nemo_rl.fakes import FAST, CharacterTokenizer, CountingEnvironment, FakePolicy, batch_of, contents
from tests.environments.ray_actors import Renewed, actor_pool

FACES = pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])


class Actor(CountingEnvironment, Renewed):
    """The same environment, which may also be asked how often it was called, or fail."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any:
        returned = super().step(message_log_batch, metadata)
        if any(state.get("bad") for state in metadata):
            raise ValueError("as told")
        return returned

    def calls(self) -> list[int]:
        return self.batches


@pytest.fixture(scope="module")
def actors(ray: Any) -> Iterator[Callable[[], Any]]:
    with actor_pool(ray, Actor) as maker:
        yield maker


@pytest.fixture
def actor(actors: Any) -> Any:
    return actors()()


def roll(run: Any, batch: Any, environments: Any) -> Any:
    return run(FakePolicy(), batch, CharacterTokenizer(), environments, 1000, limits=FAST)


@FACES
def test_actors_and_objects_in_one_batch(run: Any, actor: Any) -> None:
    environments = {"actor": actor, "object": CountingEnvironment("here")}
    tasks = ["actor", "object", "actor", "object"]
    final, _ = roll(run, batch_of(*[{"turns": 1 + row} for row in range(4)], task_name=tasks), environments)
    assert final["total_reward"].tolist() == [1.0, 2.0, 3.0, 4.0]
    for task, log in zip(tasks, final["message_log"], strict=True):
        assert contents(log)[-1] == ("environment", "obs" if task == "actor" else "here")


def test_lockstep_is_one_actor_call_for_each_turn(ray: Any, actor: Any) -> None:
    roll(run_multi_turn_rollout, batch_of(*[{"turns": 1 + row % 2} for row in range(8)]), {"env": actor})
    assert ray.get(actor.calls.remote()) == [8, 4]


def test_concurrent_steps_travel_together(ray: Any, actor: Any) -> None:
    roll(run_async_multi_turn_rollout, batch_of(*[{"turns": 1}] * 64), {"env": actor})
    calls = ray.get(actor.calls.remote())
    assert sum(calls) == 64
    assert len(calls) < 64


@FACES
def test_a_failing_episode_fails_alone(run: Any, actor: Any) -> None:
    final, _ = roll(run, batch_of(*[{"turns": 1, "bad": row == 1} for row in range(3)]), {"env": actor})
    assert final["stop_reason"] == ["terminated", "failed", "terminated"]
    assert final["failure"][1].cause == "step raised ValueError: as told"


@FACES
async def test_actors_where_a_loop_runs(run: Any, actor: Any) -> None:
    final, _ = roll(run, batch_of({"turns": 2}), {"env": actor})
    assert final["total_reward"].tolist() == [2.0]


@pytest.fixture(scope="module")
def fast() -> Any:
    """A real Hugging Face tokenizer with a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1, "hello": 2, "world": 3, "again": 4, "<unk>": 5}
    rust = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


@pytest.mark.parametrize("text", ["", "hello world", "hello<end> again"])
def test_a_fast_tokenizer_makes_the_same_of_a_text_either_way(fast: Any, text: str) -> None:
    ours, theirs = tokenizer_of(fast), ForeignTokenizer(fast)
    assert not isinstance(ours, ForeignTokenizer)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("<end>", "")
    assert decode_all(fast, [torch.tensor(ids.tolist(), dtype=torch.int64)]) == [ours.decode(ids)]


@FACES
def test_a_rollout_with_a_fast_tokenizer(run: Any, fast: Any) -> None:
    class Policy(FakePolicy):
        def _output(self, data: Any) -> Any:
            rows = [
                torch.cat([ids[:length], torch.tensor([3, 1])])
                for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
            ]
            return {
                "output_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
            }

    batch = batch_of({"turns": 1, "say": "again again"})
    batch["message_log"] = [[{"role": "user", "content": "hello", "token_ids": torch.tensor([2])}]]
    final, _ = run(Policy(), batch, fast, {"env": CountingEnvironment()}, 100)
    messages = final["message_log"][0][1:]
    # The end of the sequence is in the ids, and not in the text.
    assert [(message["content"], message["token_ids"].tolist()) for message in messages] == [
        ("world", [3, 1]), ("again again", [4, 4]),
    ]  # fmt: skip


def test_padding_tokens() -> None:
    class Without:
        pad_token_id = None

    assert (pad_token_of(Without()), pad_token_of(CharacterTokenizer())) == (0, 0)
