"""Token-exact continuation, on an alphabet in which most texts can be encoded in more than one way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Continuation, Generated, Texts
from kuberoll_workers.serving.openai_api.token_chains import Chain, TokenChains

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


TEXTS = Texts(decode, encode, END, lambda text, *_: (text.replace(" ", ""), []))


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


def chats_of_many_turns(agents: int, turns: int, longest: int, chats: ChatMemory) -> int:
    """Play chats turn by turn; returns the number of turns that did not begin with what was sampled."""
    inexact = 0
    step = longest // turns
    sampled: list[array[int]] = [token_array() for _ in range(agents)]
    for turn in range(turns):
        for agent in range(agents):
            # Each agent's own tokens: nothing is shared between them.
            base = 1_000_000 + agent * longest + turn * step
            prompt = sampled[agent] + token_array(range(base, base + step - 8))
            found = chats.continue_chat(str(agent), prompt)
            inexact += turn > 0 and found.continuity != "clean"
            response = token_array([2 + turn] * 8)
            chats.remember(
                str(agent), Generated(rendered=prompt, ids=found.ids + response, read=len(found.ids), end=None)
            )
            sampled[agent] = found.ids + response
    return inexact


def test_a_chat_of_many_turns_is_stored_once() -> None:
    texts = Texts(lambda ids: " ".join(map(str, ids)), encode, END, TEXTS.read)
    for turns in (1, 20):
        chats = ChatMemory(texts)
        assert chats_of_many_turns(2, turns, 20_000, chats) == 0
        # Less than a block more for each turn.
        assert 40_000 <= chats.tokens <= 40_000 + 2 * turns * 128


@pytest.mark.long
def test_128_agents_of_20_turns_to_20_000_tokens_are_token_exact() -> None:
    texts = Texts(lambda ids: " ".join(map(str, ids)), encode, END, TEXTS.read)
    assert chats_of_many_turns(128, 20, 20_000, ChatMemory(texts)) == 0


def test_a_session_with_more_than_its_share_forgets_its_own() -> None:
    chats = memory(tokens=4_000)
    chats.remember("good", response("<user>a<end>", [2, 3, END]))
    for number in range(400):
        rendered = token_array([2 + (number >> bit & 1) for bit in range(9)] * 60)
        chats.remember("bad", Generated(rendered=rendered, ids=rendered, read=len(rendered), end=None))
        assert chats.tokens <= 4_000
    assert chats.continue_chat("good", encode("<user>a<end>ab<end>")).continuity == "realigned"


def test_a_session_that_has_ended_takes_nothing() -> None:
    chats = memory()
    chats.remember("s", response("<user>a<end>", [2, 3, END]))
    chats.forget("s")
    chats.forget("s")
    assert chats.tokens == 0
    assert chats.continue_chat("s", encode("<user>a<end>ab<end>")).continuity == "new"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 700), st.integers(0, 2), st.booleans()), max_size=30))
def test_chains_hold_each_block_once_and_give_back_what_they_took(
    made: list[tuple[int, int, int, bool]],
) -> None:
    chains = TokenChains()
    held: list[tuple[Chain, list[int]]] = []
    for base, length, value, gone in made:
        ids = [*(held[base % len(held)][1] if held and base else []), *[value] * length]
        held.append((chains.hold(token_array(ids)), ids))
        if gone:
            chains.release(held.pop(base % len(held))[0])
        blocks = {tuple(ids[:end]) for _, ids in held for end in range(128, len(ids) + 1, 128)}
        assert chains.tokens == 128 * len(blocks) + sum(len(ids) % 128 for _, ids in held)
        for chain, ids in held:
            assert chain.ids().tolist() == ids
            assert chain.ids(len(ids) // 2).tolist() == ids[len(ids) // 2 :]
            assert chain.length == len(ids)
    for chain, _ in held:
        chains.release(chain)
    assert chains.tokens == 0
