"""Generation by `POST /v1/completions` of an OpenAI-compatible server: its bodies, and what they mean."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenizer import Tokenizer
from kuberoll_workers.policy.external.extensions import extensions
from kuberoll_workers.policy.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
)

EXTENDED, PLAIN, BARE = range(3)
"""What a server is asked for, from all to least: vLLM's fields too; OpenAI's; OpenAI's without log-probabilities."""

_TOKEN_ID = "token_id:"
_FINISHED: dict[str, FinishReason] = {
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    policy_versions: list[tuple[str, int, int]] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def completion_body(request: GenerationRequest, *, model: str, room: int, dialect: int) -> dict[str, Any]:
    """The body of a request.

    Args:
        room: Tokens to generate at most.

    Raises:
        PolicyRefused: The request needs what a server of this dialect does not know.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.token_ids.tolist(),
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if dialect == EXTENDED:
        return body | {
            # The sampled token's own, and no others.
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "include_stop_str_in_output": True,
            **extensions(sampling),
        }
    for name, given in (("topK", sampling.top_k > 0), ("stopTokenIds", bool(sampling.stop_token_ids))):
        if given:
            raise PolicyRefused(
                f"spec.generation.sampling.{name}: the server takes OpenAI's own fields only; remove it"
            )
    return body | {"logprobs": 1} if dialect == PLAIN else body


def completion_result(body: bytes, *, stop: Sequence[str], tokenizer: Tokenizer | None) -> GenerationResult:
    """What a server answered.

    Args:
        stop: The request's stop strings.
        tokenizer: Encodes the text where the server does not tell its ids.

    Raises:
        PolicyUnavailable: It is not a completion, or one that was not finished.
        PolicyRefused: The server did not want to complete this, or its ids are needed.
    """
    try:
        completion = msgspec.json.decode(body, type=_Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyUnavailable(f"not a completion: {error}") from error
    if len(completion.choices) != 1:
        raise PolicyUnavailable(f"the completion has {len(completion.choices)} choices, one was asked for")
    choice = completion.choices[0]
    reason = finish_reason(choice.finish_reason)
    details = completion.usage.prompt_tokens_details if completion.usage is not None else None
    cached = (details.cached_tokens if details is not None else None) or 0
    ids = _token_ids(choice)
    if ids is None:
        return GenerationResult(
            token_ids=_encoded(_whole_text(choice, stop), tokenizer),
            logprobs=array(LOGPROB_TYPE),
            finish_reason=reason,
            cached_tokens=cached,
            exact=False,
        )
    return GenerationResult(
        token_ids=ids,
        logprobs=complete_logprobs(choice.logprobs.token_logprobs if choice.logprobs is not None else None, len(ids)),
        finish_reason=reason,
        cached_tokens=cached,
        policy_versions=tuple(choice.policy_versions or ()),
    )


def finish_reason(given: str | None) -> FinishReason:
    """What a server says, in our words.

    Raises:
        PolicyUnavailable: The response was not finished.
        PolicyRefused: The server did not want to finish it.
    """
    if given == "content_filter":
        raise PolicyRefused("the server's content filter ended the response")
    if given is None or given not in _FINISHED:
        raise PolicyUnavailable(f"the server ended the response with {given!r}")
    return _FINISHED[given]


def complete_logprobs(given: Sequence[float | None] | None, count: int) -> array[float]:
    """The log-probabilities of so many sampled tokens.

    Raises:
        PolicyUnavailable: Some are missing.
        PolicyRefused: All are: the server does not tell them.
    """
    known = [value for value in given or () if value is not None]
    if len(known) != count:
        message = f"the server returned {count} token ids but {len(known)} log-probabilities"
        raise PolicyUnavailable(message) if known else PolicyRefused(message)
    return array(LOGPROB_TYPE, known)


def check_ids(ids: array[int], vocabulary: int | None) -> None:
    """Refuse token ids that are none, before anything is made of them.

    Args:
        vocabulary: How many the tokenizer knows; None: that is not known.

    Raises:
        PolicyUnavailable: One is negative, or beyond the vocabulary.
    """
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0:
        raise PolicyUnavailable(f"the server says that it sampled the token id {lowest}; ids are not negative")
    if vocabulary is not None and highest >= vocabulary:
        raise PolicyUnavailable(
            f"the server says that it sampled the token id {highest}, and the tokenizer knows {vocabulary}; is "
            "spec.generation.model.tokenizer that of the server's model?"
        )


def _token_ids(choice: _Choice) -> array[int] | None:
    if choice.token_ids is not None:
        return token_array(choice.token_ids)
    tokens = choice.logprobs.tokens if choice.logprobs is not None else None
    if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
        return None
    return token_array(int(token.removeprefix(_TOKEN_ID)) for token in tokens)


def _whole_text(choice: _Choice, stop: Sequence[str]) -> str:
    """The text with its stop string, where the server cut that off and says which it was."""
    text = choice.text or ""
    for word in (choice.stop_reason, choice.matched_stop):
        if isinstance(word, str) and word in stop and not text.endswith(word):
            return text + word
    return text


def _encoded(text: str, tokenizer: Tokenizer | None) -> array[int]:
    if tokenizer is None:
        raise PolicyRefused("the server tells no token ids, and there is no tokenizer to encode its text with")
    return tokenizer.encode(text)
