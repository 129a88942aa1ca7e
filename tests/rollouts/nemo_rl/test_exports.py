"""The functions are where NeMo RL's users look for them, with their arguments, and cost nothing until they are used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

from kuberoll_workers import rollouts

ARGUMENTS = {
    "generate_responses": (
        "policy_generation generation_input_data batch tokenizer input_lengths include_logprobs=True greedy=False"
    ),
    "generate_responses_async": (
        "policy_generation generation_input_data batch tokenizer input_lengths include_logprobs=True greedy=False"
    ),
    "calculate_rewards": "batch task_to_env",
    "run_multi_turn_rollout": (
        "policy_generation input_batch tokenizer task_to_env max_seq_len max_rollout_turns=999999 greedy=False"
    ),
    "async_generate_response_for_sample_turn": (
        "policy_generation sample_message_log sample_stop_strings tokenizer max_seq_len greedy=False"
    ),
    "run_sample_multi_turn_rollout": (
        "sample_idx initial_sample_state policy_generation tokenizer task_to_env max_seq_len max_rollout_turns=999999 "
        "greedy=False"
    ),
    "run_async_multi_turn_rollout": (
        "policy_generation input_batch tokenizer task_to_env max_seq_len max_rollout_turns=999999 greedy=False"
    ),
    "batched_message_log_to_flat_message": "message_log_batch pad_value_dict=None make_sequence_length_divisible_by=1",
    "get_keys_from_message_log": "message_log keys",
}


NATIVE = {
    "GroupPolicy", "Partial", "Prompt", "Rollout", "RolloutSettings", "Sample", "SampleGroup", "TrajectoryFailed",
    "rewards_differ", "run_groups", "run_rollout", "stream_groups", "stream_trajectories",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(rollouts, name)).parameters.values()
    positional = [item for item in parameters if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    written = (item.name if item.default is item.empty else f"{item.name}={item.default!r}" for item in positional)
    assert " ".join(written) == ARGUMENTS[name]
    # Whatever is ours has a default.
    assert all(item.default is not item.empty for item in parameters if item not in positional)


def test_everything_that_is_exported_is_there() -> None:
    module: Any = rollouts
    assert set(module.__all__) == {*NATIVE, *ARGUMENTS, "BatchedDataDict", "RolloutFailed", "RolloutLimits"}
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'run_rollouts'"):
        _ = module.run_rollouts


def test_the_native_names_are_those_of_the_loop() -> None:
    from kuberoll_workers.data.prompts import Sample
    from kuberoll_workers.rollouts.streaming import stream_groups

    assert rollouts.Sample is Sample
    assert rollouts.stream_groups is stream_groups


def test_what_newer_callers_pass_is_taken() -> None:
    for name in ("run_multi_turn_rollout", "run_async_multi_turn_rollout", "run_sample_multi_turn_rollout"):
        assert inspect.signature(getattr(rollouts, name)).parameters["deduplicate_multimodal_data"].default is False


def test_asking_for_one_name_loads_no_other() -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.rollouts import RolloutSettings\n"
        "print([name for name in sys.modules if 'nemo_rl' in name or name.endswith('rollouts.streaming')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_importing_is_cheap() -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.rollouts import *\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
