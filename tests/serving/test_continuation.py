"""Token-exact continuation, on an alphabet in which most texts can be encoded in more than one way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Continuation, Generated, Texts

PIECES = ["<end>", "<user>", "a", "b", "ab", "ba", " "]
END, USER = 0, 1


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def encode(text: str) -> array[int]:
    """The longest piece first: `ab` is one token, though `a` and `b` may be sampled."""
    ids = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return token_array(ids)


TEXTS = Texts(decode, encode, END, lambda text, tools, demand: (text.replace(" ", ""), []))


def memory(**limits: int) -> ChatMemory:
    return ChatMemory(TEXTS, **limits)


def response(prompt: str, sampled: Sequence[int], *, read: array[int] | None = None) -> Generated:
    rendered = encode(prompt)
    read = rendered if read is None else read
    end = END if sampled and sampled[-1] == END else None
    return Generated(rendered=rendered, ids=read + token_array(sampled), read=len(read), end=end)


def test_a_first_prompt_is_new() -> None:
    assert memory().continue_chat("s", encode("<user>a")) == Continuation(encode("<user>a"), "new")


def test_a_chat_that_encodes_as_it_was_sampled_is_clean() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [4, END]))
    following = encode("<user>a<end>ab<end><user>b")
    assert chats.continue_chat("s", following) == Continuation(following, "clean")


def test_a_chat_that_encodes_otherwise_keeps_the_sampled_ids() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [2, 3, END]))
    found = chats.continue_chat("s", encode("<user>a<end>ab<end><user>b"))
    assert found.continuity == "realigned"
    assert found.ids.tolist() == [USER, 2, END, 2, 3, END, USER, 3]


def test_a_message_that_is_written_otherwise_keeps_the_sampled_ids() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [2, 6, 3, END]))
    found = chats.continue_chat("s", encode("<user>a<end>ab<end><user>b"))
    assert (found.continuity, found.ids.tolist()) == ("realigned", [USER, 2, END, 2, 6, 3, END, USER, 3])


@pytest.mark.parametrize("text", ["<user>a<end>ba<end><user>b", "<user>b<end>ab<end><user>b", "<user>a<end>a"])
def test_another_or_edited_chat_is_a_fork(text: str) -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [2, 6, 3, END]))
    assert chats.continue_chat("s", encode(text)) == Continuation(encode(text), "forked")


def test_the_same_prompt_again_is_no_fork() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [3, END]))
    assert chats.continue_chat("s", encode("<user>a<end>")).continuity == "new"


def test_sessions_do_not_see_each_other() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [2, 3, END]))
    assert chats.continue_chat("t", encode("<user>a<end>ab<end>")).continuity == "new"


def test_chats_without_a_session_are_told_apart_by_their_beginning() -> None:
    chats = memory()
    first = encode("<user>a<end>")
    session = chats.session_of(first)
    chats.remember(session, response("<user>a<end>", [2, 3, END]))
    assert chats.session_of(encode("<user>a<end>ab<end><user>b")) == session
    assert chats.session_of(encode("<user>b<end>")) != session
    assert memory().session_of(token_array()) == ""


def test_the_oldest_sessions_are_forgotten_first() -> None:
    chats = memory(tokens=12)
    for session in "abc":
        chats.remember(session, response("<user>a<end>", [2, 3, END]))
    assert chats.tokens == 12
    following = encode("<user>a<end>ab<end>")
    assert [chats.continue_chat(session, following).continuity for session in "abc"] == [
        "new",
        "realigned",
        "realigned",
    ]


def test_a_session_has_a_largest_number_of_responses() -> None:
    chats = memory(entries=2)
    for sampled in ([2, END], [3, END], [6, END]):
        chats.remember("s", response("<user>a<end>", sampled))
    assert chats.tokens == 10


@given(
    turns=st.lists(
        st.tuples(st.lists(st.sampled_from([2, 3, 4, 5, 6]), min_size=1, max_size=6), st.booleans()), max_size=5
    )
)
def test_every_turn_begins_with_all_that_was_read_and_sampled(turns: list[tuple[list[int], bool]]) -> None:
    chats = memory()
    text, known = "<user>a<end>", token_array()
    for sampled, ended in turns:
        found = chats.continue_chat("s", encode(text))
        assert found.continuity != "forked"
        assert found.ids[: len(known)] == known
        assert decode(found.ids) == text
        known = found.ids + token_array([*sampled, END] if ended else sampled)
        chats.remember(
            "s", Generated(rendered=encode(text), ids=known, read=len(found.ids), end=END if ended else None)
        )
        text += decode(sampled) + "<end><user>b<end>"
