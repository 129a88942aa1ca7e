"""Requests and responses of `POST /v1/completions` at an OpenAI-compatible server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.policy.external.fields import openai_fields
from kuberoll_workers.policy.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    InvalidAnswer,
    PolicyRefused,
    PolicyUnavailable,
)
from kuberoll_workers.policy.responses import unfinished

EXTENDED, PLAIN, BARE = range(3)
"""Dialects of a request: with vLLM's fields; OpenAI's fields only; OpenAI's without log-probabilities."""

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


def completion_body(
    request: GenerationRequest, *, model: str, room: int, dialect: int, structured: bool = False
) -> dict[str, Any]:
    """Make the body of a request.

    Args:
        room: Maximum number of tokens to generate.
        dialect: `EXTENDED`, `PLAIN` or `BARE`.
        structured: The server is known to honor `structured_outputs`; others ignore the field.

    Raises:
        PolicyRefused: The request needs a field that this dialect lacks.
    """
    sampling = request.sampling
    if sampling.structured_outputs is not None and not structured:
        raise PolicyRefused(
            "spec.generation.sampling.structuredOutputs: the server does not say that it is vLLM or SGLang, and others "
            "ignore this setting; remove it"
        )
    body = {
        "model": model,
        "prompt": request.token_ids.tolist(),
        **openai_fields(sampling, room, extended=dialect == EXTENDED),
    }
    if dialect == EXTENDED:
        return body | {
            # The sampled token's only.
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
    return body | {"logprobs": 1} if dialect == PLAIN else body


def completion_result(
    body: bytes, *, stop: Sequence[str], tokenizer: Tokenizer | None, structured: bool = False
) -> GenerationResult:
    """Read a response.

    Args:
        stop: The request's stop strings.
        structured: The request demands a form of the response.
        tokenizer: Encodes the text if the server returns no token ids.

    Raises:
        PolicyUnavailable: It is not a finished completion.
        PolicyRefused: The server filtered it, or returns no token ids and there is no tokenizer.
    """
    try:
        completion = msgspec.json.decode(body, type=_Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidAnswer(f"not a completion: {error}") from error
    if len(completion.choices) != 1:
        raise InvalidAnswer(f"the completion has {len(completion.choices)} choices; one was requested")
    choice = completion.choices[0]
    reason = finish_reason(choice.finish_reason, structured=structured)
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


def finish_reason(given: str | None, *, structured: bool) -> FinishReason:
    """Translate a server's finish reason.

    Args:
        structured: The request demands a form of the response.

    Raises:
        PolicyUnavailable: The response was not finished.
        PolicyRefused: The server's content filter ended it, or the form cannot be had.
    """
    if given == "content_filter":
        raise PolicyRefused("the server's content filter ended the response")
    if given is None or given not in _FINISHED:
        raise unfinished(given, structured=structured)
    return _FINISHED[given]


def complete_logprobs(given: Sequence[float | None] | None, count: int) -> array[float]:
    """Check that there is a log-probability for each of `count` sampled tokens; return them as `array("f")`.

    Raises:
        PolicyUnavailable: Some are missing.
        PolicyRefused: All are missing: the server does not return them.
    """
    known = [value for value in given or () if value is not None]
    if len(known) != count:
        message = f"the server returned {count} token ids but {len(known)} log-probabilities"
        raise PolicyUnavailable(message) if known else PolicyRefused(message)
    return array(LOGPROB_TYPE, known)


def _token_ids(choice: _Choice) -> array[int] | None:
    if choice.token_ids is not None:
        return token_array(choice.token_ids)
    tokens = choice.logprobs.tokens if choice.logprobs is not None else None
    if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
        return None
    return token_array(int(token.removeprefix(_TOKEN_ID)) for token in tokens)


def _whole_text(choice: _Choice, stop: Sequence[str]) -> str:
    """The text with its stop string, if the server cut that off and reports which it was."""
    text = choice.text or ""
    for word in (choice.stop_reason, choice.matched_stop):
        if isinstance(word, str) and word in stop and not text.endswith(word):
            return text + word
    return text


def _encoded(text: str, tokenizer: Tokenizer | None) -> array[int]:
    if tokenizer is None:
        raise PolicyRefused("the server returns no token ids, and there is no tokenizer to encode its text with")
    return tokenizer.encode(text)
