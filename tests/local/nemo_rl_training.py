"""NeMo RL's own GRPO, synchronous or asynchronous, with a served engine as its generation; run by test_nemo_rl.py.

NeMo RL's policies need GPUs, so that a small one in PyTorch has their place. All else is NeMo RL's: the loop, rollouts,
environment, advantages, loss, and in the asynchronous loop the collector and the replay buffer, which are Ray actors.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from nemo_rl.algorithms.grpo import GRPOSaveState, MasterConfig, async_grpo_train, grpo_train
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleEnv
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl.utils.logger import Logger
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from kuberoll_workers.adapters.nemo_rl import PublishedWeights, ServedGeneration
from tests.local.nemo_rl_parts import PAD, ServedWeights, puzzle

LOOP, CONFIG, MODEL, ENGINE, FOLDER = sys.argv[1:6]
STEPS, PROMPTS, SAMPLES, WINDOW, TURNS = 12, 8, 8, 512, 4
RATE = 1e-4
TASK = "sliding_puzzle_game"

served = json.loads(Path(ENGINE).read_text())
folder = Path(FOLDER)


class TorchPolicy(ColocatablePolicyInterface):  # type: ignore[misc]
    """A policy of NeMo RL's interface in one process."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.version = 0
        # The size of each axis.
        self.sharding_annotations = SimpleNamespace(get_axis_size=lambda axis: 1)

    def publish(self) -> None:
        self.version += 1
        ServedWeights(served).publish(self.model, folder / f"weights-{self.version}", self.version)

    def _logprobs(self, data: Any) -> torch.Tensor:
        """Of each token after the first, [sequences, length - 1]."""
        ids = data["input_ids"]
        mask = torch.arange(ids.shape[1])[None] < data["input_lengths"][:, None]
        scores: torch.Tensor = self.model(ids, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None])[..., 0]

    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        with torch.no_grad():
            return BatchedDataDict({"logprobs": torch.nn.functional.pad(self._logprobs(data), (1, 0))})

    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: Any = None, timer: Any = None) -> Any:
        raise AssertionError("the loss has no penalty for it")

    def get_topk_logits(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this is for distillation")

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, *, gbs: Any = None, mbs: Any = None, timer: Any = None
    ) -> dict[str, Any]:
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        loss, metrics = loss_fn(self._logprobs(data), data, global_valid_seqs=sequences, global_valid_toks=tokens)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        metrics |= {"lr": RATE, "wd": 0.01, "global_valid_seqs": float(sequences), "global_valid_toks": float(tokens)}
        return {
            "loss": loss.detach().reshape(1),
            "grad_norm": norm.reshape(1),
            "all_mb_metrics": {name: [float(value)] for name, value in metrics.items()},
        }

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    prepare_for_training = finish_training = prepare_for_lp_inference = _nothing
    offload_before_refit = offload_after_refit = save_checkpoint = _nothing
    prepare_refit_info = calibrate_qkv_fp8_scales = _nothing

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the generation backend brings its own way for weights")

    init_collective = stream_weights_via_ipc_zmq = broadcast_weights_for_collective = _absent

    def shutdown(self) -> bool:
        return True


class Log(Logger):  # type: ignore[misc]
    """NeMo RL's logger, which keeps what it is told as well."""

    told: dict[str, dict[int, dict[str, Any]]] = {}  # noqa: RUF012 - one for the process

    def log_metrics(self, metrics: Any, step: int, prefix: str = "", *args: Any, **named: Any) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self.told.setdefault(prefix, {}).setdefault(step, {}).update(numbers)
        super().log_metrics(metrics, step, prefix, *args, **named)


def configuration() -> MasterConfig:
    """NeMo RL's example of the sliding puzzle, made small."""
    register_omegaconf_resolvers()
    config: Any = OmegaConf.to_container(load_config(CONFIG), resolve=True)
    config["policy"] |= {"model_name": MODEL, "max_total_sequence_length": WINDOW, "precision": "float32"}
    config["policy"] |= {"train_global_batch_size": PROMPTS * SAMPLES, "train_micro_batch_size": PROMPTS * SAMPLES}
    config["policy"]["make_sequence_length_divisible_by"] = 1
    config["policy"]["generation"] |= {"max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": None}
    config["policy"]["generation"]["colocated"] = {
        "enabled": False,
        "resources": {"gpus_per_node": 1, "num_nodes": 1},
    }
    config["policy"]["generation"]["vllm_cfg"] |= {"async_engine": True, "max_model_len": WINDOW}
    config["policy"]["generation"]["_pad_token_id"] = PAD
    config["grpo"] |= {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": SAMPLES, "max_num_steps": STEPS}
    config["grpo"] |= {"max_rollout_turns": TURNS, "max_num_epochs": 100, "val_period": 0}
    config["grpo"]["skip_reference_policy_logprobs_calculation"] = True
    config["grpo"]["async_grpo"] |= {"enabled": LOOP == "asynchronous", "in_flight_weight_updates": True}
    config["loss_fn"] |= {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True}
    config["checkpointing"] |= {"enabled": False, "checkpoint_dir": str(folder / "checkpoints")}
    config["logger"] |= {"log_dir": str(folder / "logs"), "monitor_gpus": False}
    config["cluster"] |= {"gpus_per_node": 1, "num_nodes": 1}
    return MasterConfig(**config)


def puzzles(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    random.seed(0)
    rows = []
    for index in range(count):
        game, message = puzzle(tokenizer, shuffle_moves=2)
        rows.append(
            {
                "message_log": [message],
                "length": len(message["token_ids"]),
                "extra_env_info": {"game_state": game, "num_moves": 0, "max_moves": TURNS},
                "loss_multiplier": 1.0,
                "idx": index,
                "task_name": TASK,
                "stop_strings": ["</action>"],
            }
        )
    return rows


def main() -> None:
    torch.manual_seed(0)
    # Without virtual environments of their own, which NeMo RL would make with uv.
    for actor in ("AsyncTrajectoryCollector", "ReplayBuffer"):
        ACTOR_ENVIRONMENT_REGISTRY[f"nemo_rl.algorithms.async_utils.{actor}"] = sys.executable
    config = configuration()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token_id = PAD
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, address="local")
    # Of NeMo RL's watch over memory, which would find the engine's Ray too.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    environments = {TASK: SlidingPuzzleEnv.options(num_cpus=0).remote({"game_config": {"size": 2}})}
    policy = TorchPolicy()
    generation = ServedGeneration(
        config.policy["generation"],
        served["url"],
        token=served["tokens"]["generate"],
        weight_synchronizer=PublishedWeights(policy.publish),
    )
    log = Log(config.logger)
    rows = StatefulDataLoader(
        puzzles(tokenizer, PROMPTS * (STEPS + 4)),
        batch_size=PROMPTS,
        collate_fn=rl_collate_fn,
        drop_last=True,
    )
    state = GRPOSaveState(
        consumed_samples=0, current_step=0, current_epoch=0, total_steps=0, total_valid_tokens=0, val_reward=0.0
    )
    loop = grpo_train if LOOP == "synchronous" else async_grpo_train
    loop(
        policy, generation, rows, None, tokenizer, ClippedPGLossFn(config.loss_fn), environments, None, log,
        CheckpointManager(config.checkpointing), state, config,
    )  # fmt: skip
    generation.shutdown()
    ray.shutdown()
    (folder / "told.json").write_text(json.dumps({"train": log.told["train"], "version": policy.version}))


main()
