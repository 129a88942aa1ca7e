"""Requests and responses of SGLang's own `POST /generate`, which takes and returns token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.external.completions import complete_logprobs, finish_reason
from kuberoll_workers.policy.external.fields import sglang_fields
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    InvalidAnswer,
    PolicyRefused,
    StructuredOutputs,
)


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    # Log-probability, id, and the token's text or null.
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    cached_tokens: int | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


def generate_body(request: GenerationRequest, *, room: int) -> dict[str, Any]:
    """Make the body of a request.

    Args:
        room: Maximum number of tokens to generate.

    Raises:
        PolicyRefused: The request needs what SGLang does not have.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        **sglang_fields(sampling, room),
        **_form(sampling.structured_outputs),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    return {"input_ids": request.token_ids.tolist(), "sampling_params": parameters, "return_logprob": True}


def _form(form: StructuredOutputs | None) -> dict[str, str]:
    """SGLang's fields for the form of a response."""
    if form is None:
        return {}
    if form.choice is not None:
        raise PolicyRefused(
            "spec.generation.sampling.structuredOutputs.choice: SGLang has no such setting; write them as a regex"
        )
    if form.json is not None:
        return {"json_schema": msgspec.json.encode(form.json).decode()}
    return {"regex": form.regex} if form.regex is not None else {"ebnf": form.grammar or ""}


def generate_result(body: bytes, *, structured: bool = False) -> GenerationResult:
    """Read a response.

    Args:
        structured: The request demands a form of the response.

    Raises:
        PolicyUnavailable: It is not a finished result.
        PolicyRefused: The request is at fault, or the server returns no token ids.
    """
    try:
        meta = msgspec.json.decode(body, type=_Generated).meta_info
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidAnswer(f"not a result of SGLang's /generate: {error}") from error
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort" and 400 <= (finish.status_code or 500) < 500:
        raise PolicyRefused(f"the server refused the request: {finish.message}")
    reason = finish_reason(None if finish is None else finish.type, structured=structured)
    if meta.output_token_logprobs is None:
        raise PolicyRefused("the server returned no output_token_logprobs, which have the sampled token ids")
    sampled = meta.output_token_logprobs
    return GenerationResult(
        token_ids=token_array(token for _, token, _ in sampled),
        logprobs=complete_logprobs([logprob for logprob, _, _ in sampled], len(sampled)),
        finish_reason=reason,
        cached_tokens=meta.cached_tokens or 0,
    )
