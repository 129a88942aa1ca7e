"""NeMo RL's functions have its arguments, and importing them loads no engine."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from kuberoll_workers.adapters import nemo_rl

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
    "run_async_multi_turn_rollout_groups": (
        "policy_generation input_batch tokenizer task_to_env max_seq_len num_generations max_rollout_turns=999999 "
        "greedy=False deduplicate_multimodal_data=False"
    ),
    "batched_message_log_to_flat_message": "message_log_batch pad_value_dict=None make_sequence_length_divisible_by=1",
    "get_keys_from_message_log": "message_log keys",
    "run_async_nemo_gym_rollout": (
        "policy_generation input_batch tokenizer task_to_env generation_config num_generations log_full_result_tables "
        "max_seq_len=None max_rollout_turns=None greedy=False effort_config=None reward_penalty_config=None "
        "thinking_tags=None mask_env_flagged_samples=True returns_entire_batch=False sampling_params=None "
        "deduplicate_multimodal_data=False debug_payload_metrics=False"
    ),
    "run_nemo_gym_rollout_sync": (
        "policy_generation input_batch tokenizer task_to_env generation_config log_full_result_tables "
        "max_seq_len=None max_rollout_turns=None greedy=False effort_config=None reward_penalty_config=None "
        "thinking_tags=None sampling_params=None mask_env_flagged_samples=True "
        "deduplicate_multimodal_data=False debug_payload_metrics=False"
    ),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(nemo_rl, name)).parameters.values()
    positional = [item for item in parameters if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    written = (item.name if item.default is item.empty else f"{item.name}={item.default!r}" for item in positional)
    assert " ".join(written) == ARGUMENTS[name]
    # Whatever is ours has a default.
    assert all(item.default is not item.empty for item in parameters if item not in positional)


def test_every_exported_name_is_there() -> None:
    classes = {"BatchedDataDict", "NemoGymRolloutResult", "PublishedWeights", "RolloutFailed", "RolloutLimits"}
    classes |= {"RolloutGroupResult", "ServedGeneration"}
    assert set(nemo_rl.__all__) == {*ARGUMENTS, *classes}
    for name in nemo_rl.__all__:
        assert getattr(nemo_rl, name).__name__ == name


def test_what_newer_callers_pass_is_taken() -> None:
    for name in ("run_multi_turn_rollout", "run_async_multi_turn_rollout", "run_sample_multi_turn_rollout"):
        assert inspect.signature(getattr(nemo_rl, name)).parameters["deduplicate_multimodal_data"].default is False


def test_importing_is_cheap() -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.adapters.nemo_rl import *\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
