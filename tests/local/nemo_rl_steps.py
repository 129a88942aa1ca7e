"""NeMo RL's own rollout functions and environment over a served engine; run by test_nemo_rl.py."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleEnv
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout
from nemo_rl.models.generation.interfaces import GenerationInterface, verify_right_padding
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kuberoll_workers.adapters.nemo_rl import PublishedWeights, ServedGeneration
from tests.local.nemo_rl_parts import PAD, ServedWeights, puzzle

MODEL, ENGINE, WEIGHTS = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
SAMPLES, WINDOW = 6, 512

tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token_id = PAD
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def publish() -> None:
    ServedWeights(ENGINE).publish(model, WEIGHTS, 1)


def puzzles() -> Any:
    torch.manual_seed(0)
    logs, states = [], []
    for _ in range(SAMPLES):
        game, message = puzzle(tokenizer, shuffle_moves=5)
        logs.append([message])
        states.append({"game_state": game, "num_moves": 0, "max_moves": 4})
    return BatchedDataDict(
        {
            "message_log": logs,
            "extra_env_info": states,
            "task_name": ["puzzle"] * SAMPLES,
            "stop_strings": [["</action>"]] * SAMPLES,
            "loss_multiplier": torch.ones(SAMPLES),
            "idx": list(range(SAMPLES)),
        }
    )


def rescored(batch: Any) -> dict[str, Any]:
    """The largest difference between a response's log-probabilities and those of the model, and what was compared."""
    largest, compared, turns = 0.0, 0, 0
    for log in batch["message_log"]:
        ids = torch.cat([message["token_ids"] for message in log])
        with torch.no_grad():
            scores = model(ids[None]).logits[0].log_softmax(-1)
        end = 0
        for message in log:
            begin, end = end, end + len(message["token_ids"])
            if message["role"] != "assistant":
                continue
            turns += 1
            own = scores[begin - 1 : end - 1].gather(-1, ids[begin:end, None])[:, 0]
            compared += end - begin
            largest = max(largest, float((own - message["generation_logprobs"]).abs().max()))
            # What was sampled, and not an encoding of its text.
            assert tokenizer.decode(message["token_ids"], skip_special_tokens=True) == message["content"]
    return {"largest": largest, "compared": compared, "turns": turns, "rewards": batch["total_reward"].tolist()}


for interface, ours in ((GenerationInterface, ServedGeneration), (WeightSynchronizer, PublishedWeights)):
    needed = {name for name in dir(interface) if not name.startswith("_")}
    # NCCL's resharding and its geometry are for engines that take weights from a collective.
    needed -= {"register", "prepare_nccl_reshard_refit_info", "nccl_reshard_refit", "get_collective_sender_spec"}
    assert not needed - set(dir(ours)), needed - set(dir(ours))

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local")
environments = {"puzzle": SlidingPuzzleEnv.options(num_cpus=0).remote({"game_config": {"size": 2}})}
synchronizer = PublishedWeights(publish)
generation = ServedGeneration(
    {
        "max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_strings": None,
        "stop_token_ids": None, "_pad_token_id": PAD, "vllm_cfg": {"max_model_len": WINDOW},
    },
    ENGINE["url"],
    token=ENGINE["tokens"]["generate"],
    weight_synchronizer=synchronizer,
)  # fmt: skip

found: dict[str, Any] = {}
for name, run in (("blocking", run_multi_turn_rollout), ("asynchronous", run_async_multi_turn_rollout)):
    batch, metrics = run(generation, puzzles(), tokenizer, environments, WINDOW, max_rollout_turns=4)
    found[name] = {**rescored(batch), "metrics": metrics["mean_gen_tokens_per_sample"]}

prompts = [log[0]["token_ids"] for log in puzzles()["message_log"]]
data = BatchedDataDict(
    {
        "input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=PAD),
        "input_lengths": torch.tensor([len(ids) for ids in prompts]),
        "stop_strings": [None] * SAMPLES,
    }
)
verify_right_padding(data, pad_value=PAD)
together = generation.generate(data, greedy=True)
verify_right_padding(together, pad_value=PAD)


async def one_by_one() -> dict[int, Any]:
    # As NeMo RL's collector has it, which is an actor.
    copied = pickle.loads(pickle.dumps(generation))
    try:
        return {row: output async for row, output in copied.generate_async(data, greedy=True)}
    finally:
        copied.shutdown()


for row, output in sorted(asyncio.run(one_by_one()).items()):
    length = int(output["unpadded_sequence_lengths"][0])
    assert torch.equal(output["output_ids"][0, :length], together["output_ids"][row, :length])
    assert torch.allclose(output["logprobs"][0, :length], together["logprobs"][row, :length], atol=1e-4)

# Other weights, published as NeMo RL's refit_policy_generation does it after a step.
for parameter in model.parameters():
    parameter.data += 0.02 * torch.randn_like(parameter)
assert synchronizer.is_stale
assert generation.weight_synchronizer.sync_weights(timer=None, kv_scales=None) == {}
assert not synchronizer.is_stale
batch, _ = run_multi_turn_rollout(generation, puzzles(), tokenizer, environments, WINDOW, max_rollout_turns=4)
found["after weights"] = rescored(batch)
generation.shutdown()
Path(sys.argv[4]).write_text(json.dumps(found))
ray.shutdown()
