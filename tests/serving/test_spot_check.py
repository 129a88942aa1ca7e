"""The choice of responses that an engine scores once more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.serving.engines.self_check import Pair
from kuberoll_workers.serving.engines.spot_check import (
    MOST_LOGITS,
    Response,
    SpotChecks,
    longest_for,
    response_of,
)

WHOLE: Distribution = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
LONGEST = 200


def response(prompt: int, ids: int, version: str = "0") -> Response:
    return Response(range(prompt), range(ids), [-1.0] * ids, version)


@given(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 150), st.sampled_from("012")), max_size=200))
def test_checks_compute_no_more_than_their_share(lengths: list[tuple[int, int, str]]) -> None:
    spots, share = SpotChecks(longest=LONGEST, share=0.1), 0.1
    computed = checked = 0
    for prompt, ids, version in lengths:
        given_response = response(prompt, ids, version)
        computed += given_response.tokens
        found = spots.choose(given_response, WHOLE, computed=given_response.tokens, version=version)
        if found is not None:
            checked += found.tokens
            assert found.version == version
            assert found.ids
            assert found.tokens <= LONGEST
        assert checked <= share * computed
    assert spots.tally.responses == len(lengths)


@given(st.integers(1, 40), st.floats(0.01, 0.5))
def test_the_share_is_used(tokens: int, share: float) -> None:
    spots = SpotChecks(longest=LONGEST, share=share)
    chosen = sum(
        spots.choose(response(tokens, tokens), WHOLE, computed=2 * tokens, version="0") is not None for _ in range(1000)
    )
    assert abs(chosen - 1000 * share) <= 2


def test_every_response_may_be_chosen() -> None:
    spots, found = SpotChecks(longest=LONGEST, share=0.02), set()
    for number in range(5000):
        chosen = spots.choose(Response([number % 50], [1] * 20, [-1.0] * 20, "0"), WHOLE, computed=21, version="0")
        if chosen is not None:
            found.add(chosen.prompt[0])
    # A rule of every fiftieth would see one row of a dataset alone.
    assert len(found) > 30


def test_only_what_scores_of_prompts_can_be_compared_with_is_chosen() -> None:
    for distribution in (
        {**WHOLE, "temperature": 0.7},
        {**WHOLE, "top_p": 0.9},
        {**WHOLE, "top_k": 50},
        {**WHOLE, "min_tokens": 3},
        {**WHOLE, "structured_outputs": "json"},
        {**WHOLE, "constraints": ["logit_bias"]},
    ):
        spots = SpotChecks(longest=LONGEST, share=1.0)
        assert all(spots.choose(response(10, 10), distribution, computed=20, version="0") is None for _ in range(10))
        assert spots.choose(response(10, 10), WHOLE, computed=20, version="0") is not None


def test_responses_of_other_weights_or_of_several_are_not_chosen() -> None:
    spots = SpotChecks(longest=LONGEST, share=1.0)
    mixed = response_of([1], [1, 2], [-1.0, -1.0], [("0", 0, 1), ("1", 1, 2)])
    assert mixed.version == ""
    assert spots.choose(mixed, WHOLE, computed=9, version="1") is None
    assert spots.choose(response(3, 3, "0"), WHOLE, computed=9, version="1") is None
    assert spots.choose(response(3, 3, "1"), WHOLE, computed=9, version="1") is not None
    # One that waits until it is paid for is forgotten when the weights change.
    spots = SpotChecks(longest=LONGEST, share=0.5)
    assert spots.choose(response(30, 30, "1"), WHOLE, computed=60, version="1") is None
    assert spots.choose(response(90, 90, "2"), WHOLE, computed=60, version="2") is None


def test_the_longest_is_what_memory_is_left_for() -> None:
    assert longest_for(151_936, 32_768) == MOST_LOGITS // 151_936 == 441
    assert longest_for(512, 512) == 511


def test_the_tally_has_the_largest_difference() -> None:
    spots = SpotChecks(longest=LONGEST)
    spots.count([Pair(-1.0, -1.25), Pair(-2.0, -2.0)])
    spots.count([Pair(-1.0, -1.0)])
    assert (spots.tally.checked, spots.tally.largest) == (2, 0.25)


def test_a_response_without_tokens_is_not_chosen() -> None:
    spots = SpotChecks(longest=LONGEST, share=1.0)
    assert all(spots.choose(response(10, 0), WHOLE, computed=10, version="0") is None for _ in range(10))
    assert spots.choose(response(10, 1), WHOLE, computed=11, version="0") is not None
