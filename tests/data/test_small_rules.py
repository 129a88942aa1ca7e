"""Rules of a line or two, each of which changes what people read."""

from __future__ import annotations

import pytest

from kuberoll_workers.data.failure_causes import FailureCauses
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.prompts import prompt_messages
from kuberoll_workers.data.text import clock, cut
from tests.output.support import failure


def test_the_earliest_cause_is_that_of_the_first_failure() -> None:
    causes = FailureCauses()
    assert causes.earliest is None
    assert [causes.add(failure(task, cause=cause)) for task, cause in enumerate(["a", "b", "b"])] == [True, True, False]
    assert causes.earliest is not None
    assert (causes.earliest.first.cause, causes.earliest.count) == ("a", 1)
    assert [cause.first.cause for cause in causes.by_count()] == ["b", "a"]


def test_the_last_message_of_a_prompt_has_the_ids_of_all() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
    ids = [list(message.token_ids) for message in prompt_messages(chat, token_array([1, 2, 3]))]
    assert ids == [[], [], [1, 2, 3]]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_long_text_is_cut_in_its_middle() -> None:
    assert cut("abcdefgh", 8) == "abcdefgh"
    assert cut("abcdefghijklmnopqrst", 8) == "abcdef\n[… 12 characters left out …]\nst"
