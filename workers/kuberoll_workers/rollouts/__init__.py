"""The heart: generate, step the environments, reward, repeat.

What is exported here are NeMo RL's rollout functions, as faces over the loop: `docs/nemo-rl.md`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kuberoll_workers.rollouts.nemo_rl.batched_data_dict import BatchedDataDict
    from kuberoll_workers.rollouts.nemo_rl.failures import RolloutFailed
    from kuberoll_workers.rollouts.nemo_rl.generation import (
        async_generate_response_for_sample_turn,
        generate_responses,
        generate_responses_async,
    )
    from kuberoll_workers.rollouts.nemo_rl.limits import RolloutLimits
    from kuberoll_workers.rollouts.nemo_rl.message_logs import (
        batched_message_log_to_flat_message,
        get_keys_from_message_log,
    )
    from kuberoll_workers.rollouts.nemo_rl.rewards import calculate_rewards
    from kuberoll_workers.rollouts.nemo_rl.rollout import (
        run_async_multi_turn_rollout,
        run_multi_turn_rollout,
        run_sample_multi_turn_rollout,
    )

__all__ = [
    "BatchedDataDict",
    "RolloutFailed",
    "RolloutLimits",
    "async_generate_response_for_sample_turn",
    "batched_message_log_to_flat_message",
    "calculate_rewards",
    "generate_responses",
    "generate_responses_async",
    "get_keys_from_message_log",
    "run_async_multi_turn_rollout",
    "run_multi_turn_rollout",
    "run_sample_multi_turn_rollout",
]

# Imported when they are asked for: a worker that uses none of them does not pay for them.
_MODULES = {
    "BatchedDataDict": "nemo_rl.batched_data_dict",
    "RolloutFailed": "nemo_rl.failures",
    "RolloutLimits": "nemo_rl.limits",
    "async_generate_response_for_sample_turn": "nemo_rl.generation",
    "batched_message_log_to_flat_message": "nemo_rl.message_logs",
    "calculate_rewards": "nemo_rl.rewards",
    "generate_responses": "nemo_rl.generation",
    "generate_responses_async": "nemo_rl.generation",
    "get_keys_from_message_log": "nemo_rl.message_logs",
    "run_async_multi_turn_rollout": "nemo_rl.rollout",
    "run_multi_turn_rollout": "nemo_rl.rollout",
    "run_sample_multi_turn_rollout": "nemo_rl.rollout",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
