"""The tree of a session's calls; no engine and no server."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.serving.openai_api.exchange import Sampled
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


@given(calls, st.lists(st.integers(0, 20), max_size=5))
def test_the_tokens_of_all_paths_are_counted_as_calls_come(
    made: list[tuple[int, list[int], list[int]]], lost: list[int]
) -> None:
    found = CallTree()
    wholes: list[list[int]] = []
    for base, more, response in made:
        prompt = [*(wholes[base % len(wholes)] if wholes and base >= 0 else [7]), *more]
        wholes.append([*prompt, *response])
        found.add(sampled(prompt, response))
    for call in lost:
        if call < len(made) and call not in found.lost:
            found.lose([call])
    assert found.path_tokens == sum(len(segment.token_ids) for path in found.paths() for segment in path)
    assert len(list(found.leaves())) == len(found.paths())


def test_a_lost_call_is_in_no_path_and_gets_no_children() -> None:
    found = tree(([1], [2]), ([1], [3]))
    assert found.lose([1])
    found.add(sampled([1], [3]))
    found.add(sampled([1, 3, 4], [5]))
    assert [plain(path) for path in found.paths()] == [
        [([1], None, False), ([2], 0, True)],
        [([1], None, False), ([3], 2, True), ([4], None, False), ([5], 3, True)],
    ]
    # Somebody read it: it was not lost.
    assert not found.lose([2])


def test_a_tree_counts_all_that_a_caller_makes_it_hold() -> None:
    plain, long = tree(([1], [2])), CallTree()
    long.add(dataclasses.replace(sampled([1], [2]), chat=[{"role": "user", "content": "x" * 10**6}]))
    assert long.size > plain.size + 10**6
