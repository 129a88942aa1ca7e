"""What becomes of responses that no trajectory may have."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationResult, PolicyRefused, UnknownTokens
from kuberoll_workers.policy.responses import check_ids, check_response, unfinished, unusable


@given(st.sampled_from(["error", "abort", "repetition", None]), st.booleans())
def test_only_an_error_of_a_demanded_form_is_the_request_s(reason: str | None, structured: bool) -> None:
    refused = isinstance(unfinished(reason, structured=structured), PolicyRefused)
    assert refused == (reason == "error" and structured)


@given(st.lists(st.floats(max_value=0.0)), st.booleans())
def test_unusable_log_probabilities(logprobs: list[float], structured: bool) -> None:
    error = unusable(logprobs, structured=structured)
    assert (error is None) == all(math.isfinite(value) for value in logprobs)
    assert error is None or isinstance(error, PolicyRefused) == structured


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(1, 2**18) | st.none())
def test_ids_are_those_of_tokens(ids: list[int], vocabulary: int | None) -> None:
    good = vocabulary is None or all(0 <= token < vocabulary for token in ids)
    if good:
        check_ids(token_array(ids), vocabulary)
    else:
        with pytest.raises(UnknownTokens, match=r"spec\.generation\.model\.tokenizer"):
            check_ids(token_array(ids), vocabulary)


def test_a_response_with_padding_is_none() -> None:
    result = GenerationResult(token_ids=token_array([1, 470]), logprobs=array("f", [-1, -2]), finish_reason="stop")
    check_response(result, max_tokens=2, vocabulary=471)
    with pytest.raises(UnknownTokens, match="token id 470, and the tokenizer has the ids 0 to 431"):
        check_response(result, max_tokens=2, vocabulary=432)
