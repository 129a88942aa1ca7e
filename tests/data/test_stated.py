"""What a text states as an answer."""

from __future__ import annotations

import pytest

from kuberoll_workers.data.stated import stated_answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is 6 * 7? (For graders: the expected answer is 42.)", ["42"]),
        ("What is 6 * 7?\n\n[Reference: 42]", ["42"]),
        ("6 * 7. Answer: 42\nSolution = 43", ["42", "43"]),
        ("Write 42 to /work/answer.txt.", []),
        ("Put it into a box: the answer is \\\\boxed{}.", []),
    ],
)
def test_stated_answers(text: str, expected: list[str]) -> None:
    assert stated_answers(text) == expected
