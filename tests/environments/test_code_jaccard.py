"""Similarity of code: NeMo RL's own cases, and what is mended."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.builtin.code.jaccard import CodeJaccardEnvironment, similarity
from kuberoll_workers.environments.interface import EnvironmentReturn, UnusableRow
from kuberoll_workers.environments.registry import UnusableEnvironment


def step(
    replies: list[str], truths: list[str], config: dict[str, Any] | None = None, prompt: str = "?"
) -> EnvironmentReturn:
    logs = [[{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}] for reply in replies]
    return CodeJaccardEnvironment(config).step(logs, [{"ground_truth": truth} for truth in truths])


# ---- the cases of NeMo RL's own tests


def test_the_same_text_is_aligned() -> None:
    returned = step(["print('hello')", "a + b"], ["print('hello')", "a + b"])
    assert all("jaccard aligned" in message["content"] for message in returned.observations)
    assert list(returned.rewards) == [1.0, 1.0]
    assert list(returned.terminateds) == [True, True]


def test_another_text_is_misaligned() -> None:
    returned = step(["goodbye world"], ["print('hello')"])
    assert "jaccard misaligned" in returned.observations[0]["content"]
    assert 0.0 <= returned.rewards[0] <= 0.5
    assert list(returned.terminateds) == [True]


def test_answers_are_what_was_compared() -> None:
    returned = step(["x = a + b", "def add(a, b): return a + b"], ["x = a + b", "return a + b"])
    assert returned.answers == ["x = a + b", "def add(a, b): return a + b"]
    # 4 common words of 7, and 12 characters of 27.
    assert returned.rewards[1] == pytest.approx(4 / 7 * 12 / 27)


def test_no_episodes_are_no_results() -> None:
    returned = step([], [])
    assert [len(part) for part in returned] == [0] * 6


# ---- what is mended


def test_only_the_last_message_counts() -> None:
    # NeMo RL joins all messages of the assistant, those of examples in the prompt, too.
    log = [
        {"role": "user", "content": "example"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a + b"},
    ]
    assert CodeJaccardEnvironment().step([log], [{"ground_truth": "a + b"}]).rewards == [1.0]


def test_code_is_taken_out_of_its_block() -> None:
    reply = "<think>hm</think>Here:\n```python\na + b\n```\nIt adds."
    assert step([reply], ["a + b"]).rewards == [1.0]
    assert step([reply], ["```python\na + b\n```"]).rewards == [1.0]
    assert step([reply], ["a + b"], {"extractCode": False}).rewards[0] < 0.5


@pytest.mark.parametrize("truth", [None, 3, "", "  "])
def test_a_row_without_a_reference_is_no_reward(truth: Any) -> None:
    # NeMo RL gives 1 to an empty response then, and 0 to others.
    with pytest.raises(UnusableRow, match=r"row 7: metadata\.ground_truth"):
        CodeJaccardEnvironment().step([[{"role": "assistant", "content": ""}]], [{"ground_truth": truth, "idx": 7}])


def test_metrics_come_from_the_episodes() -> None:
    # NeMo RL reads a column of rewards that its loop does not have.
    states = [{"similarity": 1.0}, {"similarity": 0.6}, {"similarity": 0.2}, None]
    _, metrics = CodeJaccardEnvironment().global_post_process_and_metrics({"extra_env_info": states})
    assert metrics["episodes"] == 4
    assert metrics["preference_alignment_rate"] == pytest.approx(2 / 3)
    assert metrics["average_preference_score"] == pytest.approx(0.6)
    assert metrics["high_alignment_rate"] == pytest.approx(1 / 3)


def test_too_long_a_response_gets_nothing() -> None:
    assert step(["a " * 100], ["a"], {"maxCharacters": 16}).rewards == [0.0]


def test_a_wrong_config_names_its_key() -> None:
    with pytest.raises(UnusableEnvironment, match="did you mean extractCode"):
        CodeJaccardEnvironment({"extractCod": True})


def test_the_oracle_gets_1_for_what_is_generated() -> None:
    environment = CodeJaccardEnvironment()
    rows = environment.generate_dataset(8, seed=1)
    logs = [[{"role": "assistant", "content": f"```python\n{row['metadata']['ground_truth']}```"}] for row in rows]
    assert environment.step(logs, [row["metadata"] for row in rows]).rewards == [1.0] * 8
    logs = [[{"role": "assistant", "content": "I cannot."}]] * 8
    assert environment.step(logs, [row["metadata"] for row in rows]).rewards == [0.0] * 8


@given(st.text(), st.text())
def test_similarity_is_a_symmetric_share(one: str, other: str) -> None:
    found = similarity(one, other)
    assert 0.0 <= found <= 1.0
    assert found == similarity(other, one)
    assert similarity(one, one) == 1.0
