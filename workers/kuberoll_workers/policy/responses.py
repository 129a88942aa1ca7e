"""What a response must be to become part of a trajectory, whoever gave it, and who is at fault if it is not."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import isfinite

import numpy

from kuberoll_workers.policy.interface import (
    GenerationResult,
    InvalidAnswer,
    PolicyError,
    PolicyRefused,
    PolicyUnavailable,
    UnknownTokens,
)


def check_response(result: GenerationResult, *, max_tokens: int | None, vocabulary: int | None) -> None:
    """Reject a response that is none.

    Args:
        max_tokens: The requested maximum; None if the policy did not receive it.
        vocabulary: As for `check_ids`.

    Raises:
        PolicyUnavailable: It is malformed, by the endpoint's fault; the message says how.
        UnknownTokens: See `check_ids`.
    """
    ids, logprobs = len(result.token_ids), len(result.logprobs)
    if ids != logprobs and (logprobs or max_tokens is not None):
        raise InvalidAnswer(f"the response has {ids} token ids but {logprobs} logprobs")
    if not isfinite(sum(result.logprobs)):
        raise InvalidAnswer("the response has a log-probability that is not a finite number")
    if max_tokens is not None and ids > max_tokens:
        raise InvalidAnswer(f"the response has {ids} tokens, more than the {max_tokens} that were requested")
    if result.finish_reason == "abort":
        raise PolicyUnavailable("the engine aborted the request")
    check_ids(result.token_ids, vocabulary)


def check_ids(ids: array[int], vocabulary: int | None) -> None:
    """Check that sampled ids are those of tokens.

    A model may have more ids than its tokenizer has tokens: its vocabulary is padded to a round number. Engines sample
    them like all others, and nothing can be read from them. To mask them instead would change the distribution, and
    with it the log-probabilities, from those that a trainer computes.

    Args:
        vocabulary: Number of token ids of the tokenizer; None: unknown.

    Raises:
        UnknownTokens: One is negative, or beyond the vocabulary.
    """
    if vocabulary is None or not ids:
        return
    # One pass over unsigned numbers, of which the negative ones are the largest.
    if int(numpy.maximum.reduce(numpy.frombuffer(ids, dtype=numpy.uint32))) < vocabulary:
        return
    wrong = next(token for token in ids if not 0 <= token < vocabulary)
    raise UnknownTokens(
        f"the policy returned the token id {wrong}, and the tokenizer has the ids 0 to {vocabulary - 1}. Is "
        "spec.generation.model.tokenizer that of the policy's model? If it is, the model's vocabulary is padded, and "
        "the padding was sampled: lower the temperature or topP, or train the model not to"
    )


def unfinished(reason: object, *, structured: bool) -> PolicyError:
    """The error for a response that ended otherwise than by its length or a stop.

    Args:
        reason: The engine's finish reason.
        structured: The request demands a form of its response. An engine compiles it after it has accepted the
            request, and ends the request with `error` if it cannot, or if a token breaks the form.
    """
    if reason == "error" and structured:
        return PolicyRefused(
            "the engine cannot compile or follow the request's structured outputs; its log has the reason"
        )
    return PolicyUnavailable(f"the engine ended the request with {reason!r}")


def unusable(logprobs: Iterable[float], *, structured: bool) -> PolicyError | None:
    """The error for log-probabilities that are no finite numbers; None: all are.

    Args:
        structured: As for `unfinished`. A form that no token satisfies makes all of them impossible; the engine then
            samples any.
    """
    if all(map(isfinite, logprobs)):
        return None
    if structured:
        return PolicyRefused("the request's structured outputs allow no token at some place of the response")
    return InvalidAnswer("the engine returned a log-probability that is not a finite number")
