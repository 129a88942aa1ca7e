"""The tree of a session's calls, and the sessions of a replica; no engine and no server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.serving.openai_api.continuation import Texts
from kuberoll_workers.serving.openai_api.exchange import Sampled
from kuberoll_workers.serving.sessions.store import SessionRefused, Sessions
from kuberoll_workers.serving.sessions.trajectories import trajectories
from kuberoll_workers.serving.sessions.tree import CallTree, Segment


def sampled(prompt: Sequence[int], response: Sequence[int]) -> Sampled:
    return Sampled(
        prompt=token_array(prompt),
        response=token_array(response),
        logprobs=array("f", [-0.5] * len(response)),
        versions=[("0", 0, len(response))],
        finish_reason="stop",
        continuity="new",
        began=1.0,
        ended=2.0,
    )


def tree(*calls: tuple[Sequence[int], Sequence[int]]) -> CallTree:
    made = CallTree()
    for prompt, response in calls:
        made.add(sampled(prompt, response))
    return made


def plain(path: Sequence[Segment]) -> list[tuple[list[int], int | None, bool]]:
    return [(segment.token_ids.tolist(), segment.call, segment.learn) for segment in path]


def test_turns_of_one_chat_are_one_path() -> None:
    found = tree(([1], [2, 3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7]))
    assert [plain(path) for path in found.paths()] == [
        [([1], None, False), ([2, 3], 0, True), ([4], None, False), ([5], 1, True), ([6], None, False), ([7], 2, True)]
    ]
    assert found.tokens == 7


def test_branches_share_what_they_have_in_common_and_it_is_learned_from_once() -> None:
    found = tree(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 9], [5]))
    first, second = map(plain, found.paths())
    assert first == [([1], None, False), ([2], 0, True), ([3], None, False), ([4], 1, True)]
    assert second == [([1], None, False), ([2], 0, False), ([9], None, False), ([5], 2, True)]


def test_a_rewritten_history_is_a_path_of_its_own() -> None:
    found = tree(([1], [2]), ([1, 8, 3], [4]))
    assert [plain(path) for path in found.paths()] == [
        [([1], None, False), ([2], 0, True)],
        [([1, 8, 3], None, False), ([4], 1, True)],
    ]


def test_several_samples_of_a_prompt_are_leaves() -> None:
    found = tree(([1], [2]), ([1], [3]), ([1], [2]), ([1, 2], [4]))
    assert [plain(path)[-1] for path in found.paths()] == [([3], 1, True), ([2], 2, True), ([4], 3, True)]


def test_an_empty_response_is_no_segment() -> None:
    assert [plain(path) for path in tree(([1], [])).paths()] == [[([1], None, False)]]
    (path,) = tree(([1], []), ([1, 2], [3])).paths()
    assert plain(path) == [([1, 2], None, False), ([3], 1, True)]


calls = st.lists(
    st.tuples(
        st.integers(min_value=-1, max_value=20),
        st.lists(st.integers(0, 2), max_size=3),
        st.lists(st.integers(0, 2), max_size=3),
    ),
    max_size=20,
)


@given(calls)
def test_every_response_is_learned_from_once_and_every_path_is_what_was_read_and_sampled(
    made: list[tuple[int, list[int], list[int]]],
) -> None:
    found = CallTree()
    wholes: list[list[int]] = []
    for base, more, response in made:
        # An agent goes on with any earlier call, or with none.
        prompt = [*(wholes[base % len(wholes)] if wholes and base >= 0 else [7]), *more]
        wholes.append([*prompt, *response])
        found.add(sampled(prompt, response))
    learned = [segment.call for path in found.paths() for segment in path if segment.learn]
    assert sorted(call for call in learned if call is not None) == [
        number for number, (_, _, response) in enumerate(made) if response
    ]
    for leaf, path in zip(found.leaves(), found.paths(), strict=True):
        assert [token for segment in path for token in segment.token_ids] == wholes[leaf]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_closed_session_takes_no_calls_and_keeps_what_it_has(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock)
    session = sessions.open(SessionSettings(idle_seconds=10))
    sessions.enter(session.identity).record(sampled([1], [2]))
    assert sessions.close(session.identity) is sessions.close(session.identity)
    with pytest.raises(SessionRefused, match="is closed") as refused:
        sessions.enter(session.identity)
    assert refused.value.status == 410
    # A call that ends after the end is not part of what was returned.
    session.record(sampled([1, 2], [3]))
    (trajectory,) = trajectories(
        session, Texts(str, lambda _: token_array(), None, lambda text, tools, demand: (text, []))
    )
    assert [message["role"] for message in trajectory["messages"]] == ["context", "assistant"]
    clock.now = 10.5
    with pytest.raises(SessionRefused) as refused:
        sessions.find(session.identity)
    assert refused.value.status == 404


def test_an_idle_session_closes_and_its_trajectories_stay_for_a_while(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock)
    session = sessions.open(SessionSettings(idle_seconds=10))
    clock.now = 9
    sessions.enter(session.identity).record(sampled([1], [2]))
    clock.now = 18
    assert not sessions.find(session.identity).state()["closed"]
    clock.now = 20
    with pytest.raises(SessionRefused, match="is closed"):
        sessions.enter(session.identity)
    clock.now = 29
    assert sessions.close(session.identity).state()["calls"] == 1


def test_limits(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock, sessions=2, calls=1, tokens=4)
    first, second = sessions.open(), sessions.open()
    with pytest.raises(SessionRefused, match="2 sessions are open") as refused:
        sessions.open()
    assert refused.value.status == 429
    sessions.enter(first.identity).record(sampled([1], [2]))
    with pytest.raises(SessionRefused, match="has 1 responses"):
        sessions.enter(first.identity)
    sessions.enter(second.identity).record(sampled([1, 2], [2]))
    third = Sessions("r", tokens=0).open()
    with pytest.raises(SessionRefused, match="this replica does not have it"):
        sessions.enter(third.identity)


def test_tokens_of_forgotten_sessions_make_room(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock, tokens=4)
    first = sessions.open(SessionSettings(idle_seconds=10))
    second = sessions.open(SessionSettings(idle_seconds=100))
    sessions.enter(first.identity).record(sampled([1], [2]))
    sessions.enter(second.identity).record(sampled([1], [2]))
    with pytest.raises(SessionRefused, match="have 4 tokens") as refused:
        sessions.enter(second.identity)
    assert refused.value.status == 429
    # Closed after 10 s without a call, and forgotten after another 10.
    clock.now = 21
    assert sessions.enter(second.identity) is second
    with pytest.raises(SessionRefused, match="does not have it"):
        sessions.find(first.identity)


def test_a_session_of_another_replica_says_what_to_do() -> None:
    with pytest.raises(SessionRefused, match="use the base URL that opening it returned"):
        Sessions("here").find("there-1")


def test_a_token_opens_its_own_session_alone() -> None:
    sessions = Sessions("r")
    first, second = sessions.open(), sessions.open()
    assert sessions.opens(first.identity, first.token)
    assert not sessions.opens(second.identity, first.token)
    assert not sessions.opens("none", first.token)
