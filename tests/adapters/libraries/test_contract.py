"""The contract of environments, kept by all adapters with their libraries."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kuberoll_api.environment_types import LibraryEnvironment
from kuberoll_workers.authoring import check_environment

LAKE = {
    "id": "FrozenLake-v1",
    "parameters": {"is_slippery": False},
    "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
}
ARITHMETIC: dict[str, Any] = {
    "prompt": "What is 3 + 4?",
    "metadata": {"reward_spec": {"ground_truth": "7"}, "extra_info": {}},
}

SUBJECTS: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]] | None]]] = {
    "gymnasium": [(LAKE, None), ({**LAKE, "parameters": {"is_slippery": True}, "observation": "render"}, None)],
    "reasoning_gym": [({"task": "chain_sum"}, None), ({"task": "game_of_life", "tag": None}, None)],
    "skyrl_gym": [({"id": name}, [ARITHMETIC]) for name in ("gsm8k", "gsm8k_multi_turn")],
    "verifiers": [
        (
            {
                "id": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
                "arguments": {"gym": "chain_sum", "num_train_examples": 12, "num_eval_examples": 4},
            },
            None,
        )
    ],
    "textarena": [({"game": name}, None) for name in ("GuessTheNumber-v0", "ThreeCardMonte-v0", "2048-v0-ultra-easy")],
}
"""Configs of each adapter, with rows where it generates none."""


SERVED = {"mcp", "nemo_gym", "openenv"}
"""Adapters for servers, whose tests run the contract beside the server."""


def test_all_adapters_are_subjects() -> None:
    assert SUBJECTS.keys() | SERVED == set(get_args(LibraryEnvironment))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "rows"), [(name, *subject) for name, subjects in SUBJECTS.items() for subject in subjects]
)
def test_the_adapters_pass(name: str, config: dict[str, Any], rows: list[dict[str, Any]] | None) -> None:
    results = {result.check: result.status for result in check_environment(name, config, rows=rows)}
    ok = {check for check, status in results.items() if status == "ok"}
    assert ok >= {"creation", "returns", "plain", "nonsense", "determinism", "batches", "inputs", "metrics"}
    assert ("rows" in ok) == (name == "reasoning_gym")
    assert ("closing" in ok) == (name != "reasoning_gym")
    assert ("replay" in ok) == (name in ("gymnasium", "textarena"))
    assert ("state" in ok) == (name == "reasoning_gym")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_the_adapters_pass_in_a_process(name: str) -> None:
    config, rows = SUBJECTS[name][0]
    found = check_environment(name, config, rows=rows, isolation="Process")
    skipped = {result.check for result in found if result.status == "skipped"}
    assert skipped.isdisjoint({"creation", "returns", "plain", "nonsense", "determinism", "batches"})
