from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.builtin.turn import Tagged, count_of, first_tagged, quoted, reply_of

NAMES = ["call", "answer"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<call>1 + 1</call>", Tagged("call", "1 + 1")),
        ("so <answer> 4 </answer> and more", Tagged("answer", "4")),
        ("<call>1</call><answer>2</answer>", Tagged("call", "1")),
        ("<answer>2</answer><call>1</call>", Tagged("answer", "2")),
        ("<call><call>1</call>", Tagged("call", "1")),
        ("<call></call>", Tagged("call", "")),
        ("<answer>1 <call>2</call>", Tagged("call", "2")),
        ("<call>1", None),
        ("</call>", None),
        ("<call>1</answer>", None),
        ("<CALL>1</CALL>", None),
        ("", None),
    ],
)
def test_first_tagged(text: str, found: Tagged | None) -> None:
    assert first_tagged(text, NAMES) == found


@given(st.text(max_size=40), st.text(alphabet="abc 1+", max_size=20), st.text(max_size=40))
def test_text_around_a_tag_is_ignored(before: str, body: str, after: str) -> None:
    if "</call>" not in before and "</answer>" not in before:
        assert first_tagged(f"{before}<call>{body}</call>{after}", NAMES) == Tagged("call", body.strip())


@given(st.text())
def test_quoted_is_short_and_on_one_line(text: str) -> None:
    assert "\n" not in quoted(text)
    # A character may take ten in its escaped form.
    assert len(quoted(text)) <= 24 * 10 + 2


@pytest.mark.parametrize("log", [[], [{"role": "assistant"}], [{"role": "assistant", "content": None}]])
def test_a_reply_without_text_is_empty(log: list[dict[str, object]]) -> None:
    assert reply_of(log) == ""


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_a_wrong_count_is_an_error_that_names_the_key(value: object) -> None:
    with pytest.raises(ValueError, match=r"metadata\.moves"):
        count_of({"moves": value}, "moves")
