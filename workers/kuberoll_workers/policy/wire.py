"""Encoding of requests and results: msgpack with packed arrays, or plain JSON.

In msgpack, token ids are binary little-endian int32 and log-probabilities binary little-endian float32: exact, small,
and copied instead of converted. In JSON, and optionally in msgpack, they are lists. Field names are those of
vLLM's `/inference/v1/generate` where it has them.
"""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Any

import msgspec
import numpy as np

from kuberoll_workers.data.messages import LOGPROB_TYPE, TOKEN_TYPE
from kuberoll_workers.data.tool_calls import ToolCalls, UnreadableCall
from kuberoll_workers.data.tools import MAX_TOOLS, InvalidTools, checked_tools
from kuberoll_workers.policy.forms import check_grammar, check_schema
from kuberoll_workers.policy.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    SamplingParameters,
    StructuredOutputs,
    TokenId,
)

MSGPACK = "application/msgpack"
JSON = "application/json"

_ITEM_BYTES = 4
# More tokens than a body carries.
_MAX_PROMPT = 1 << 23


_Name = Annotated[str, msgspec.Meta(max_length=1024)]
# Their content is bounded by `checked_tools`.
_Tools = Annotated[list[Annotated[dict[str, Any], msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=MAX_TOOLS)]


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token_ids: (
        Annotated[bytes, msgspec.Meta(max_length=_MAX_PROMPT * _ITEM_BYTES)]
        | Annotated[list[TokenId], msgspec.Meta(max_length=_MAX_PROMPT)]
    )
    sampling_params: SamplingParameters
    request_id: _Name = ""
    session_id: _Name = ""
    tools: _Tools | None = None


class _Calls(msgspec.Struct, omit_defaults=True):
    calls: list[dict[str, Any]] = []
    invalid: list[UnreadableCall] = []
    text: str | None = None


class _Result(msgspec.Struct, kw_only=True):
    token_ids: bytes | list[TokenId]
    logprobs: bytes | list[float]
    finish_reason: FinishReason
    cached_tokens: int = 0
    policy_versions: tuple[tuple[str, int, int], ...] = ()
    tool_calls: _Calls | None = None


_decode_request = {MSGPACK: msgspec.msgpack.Decoder(_Request).decode, JSON: msgspec.json.Decoder(_Request).decode}
_decode_result = {MSGPACK: msgspec.msgpack.Decoder(_Result).decode, JSON: msgspec.json.Decoder(_Result).decode}
_encode = {MSGPACK: msgspec.msgpack.Encoder().encode, JSON: msgspec.json.Encoder().encode}


class WireError(ValueError):
    """A malformed body."""


def media_type(content_type: str | None) -> str:
    """Media type of a Content-Type header, as the codecs are named; JSON without a header.

    Raises:
        WireError: There is no codec for it.
    """
    name = (content_type or JSON).partition(";")[0].strip().lower()
    if name in ("application/x-msgpack", "application/vnd.msgpack"):
        return MSGPACK
    # The default of curl -d.
    if name == "application/x-www-form-urlencoded":
        return JSON
    if name not in _encode:
        raise WireError(f"Content-Type {name!r} is not understood; send {MSGPACK} or {JSON}")
    return name


def encode_request(request: GenerationRequest, media: str = MSGPACK) -> bytes:
    """Encode a request."""
    return _encode[media](
        {
            "request_id": request.request_id,
            "session_id": request.session_id,
            "token_ids": _packed(request.token_ids, media),
            "sampling_params": request.sampling,
            # Only where they are needed, so that a replica of an older version understands all other requests.
            **({} if request.tools is None else {"tools": list(request.tools)}),
        }
    )


def decode_request(body: bytes, media: str = MSGPACK) -> GenerationRequest:
    """Decode and check a request.

    Raises:
        PolicyRefused: It is malformed; the message names the field.
    """
    try:
        raw = _decode_request[media](body)
        token_ids = _unpacked(TOKEN_TYPE, raw.token_ids, "token_ids")
        tools = None if raw.tools is None else checked_tools(raw.tools, "tools")
        _check_form(raw.sampling_params.structured_outputs)
    except (InvalidTools, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PolicyRefused(f"the request is not understood: {error}") from error
    if not token_ids:
        raise PolicyRefused("token_ids is empty: there is nothing to continue")
    # With NumPy, because the replica checks every prompt.
    if (lowest := int(np.frombuffer(token_ids, np.int32).min())) < 0:
        raise PolicyRefused(f"token_ids holds {lowest}; token ids are not negative")
    return GenerationRequest(
        request_id=raw.request_id,
        session_id=raw.session_id,
        token_ids=token_ids,
        sampling=raw.sampling_params,
        tools=tools,
    )


def _check_form(form: StructuredOutputs | None) -> None:
    if form is not None and form.json is not None:
        check_schema(form.json, "sampling_params.structured_outputs.json")
    if form is not None and form.grammar is not None:
        check_grammar(form.grammar, "sampling_params.structured_outputs.grammar")


def encode_result(result: GenerationResult, media: str = MSGPACK) -> bytes:
    """Encode a result."""
    calls = result.tool_calls
    return _encode[media](
        {
            "token_ids": _packed(result.token_ids, media),
            "logprobs": _packed(result.logprobs, media),
            "finish_reason": result.finish_reason,
            "cached_tokens": result.cached_tokens,
            "policy_versions": result.policy_versions,
            **({} if calls is None else {"tool_calls": _Calls(calls.calls, calls.invalid, calls.text)}),
        }
    )


def decode_result(body: bytes, media: str = MSGPACK) -> GenerationResult:
    """Decode and check a result.

    Raises:
        WireError: It is truncated or not a result.
    """
    try:
        raw = _decode_result[media](body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a generation result: {error}") from error
    return GenerationResult(
        token_ids=_unpacked(TOKEN_TYPE, raw.token_ids, "token_ids"),
        logprobs=_unpacked(LOGPROB_TYPE, raw.logprobs, "logprobs"),
        finish_reason=raw.finish_reason,
        cached_tokens=raw.cached_tokens,
        policy_versions=raw.policy_versions,
        tool_calls=None if (found := raw.tool_calls) is None else ToolCalls(found.calls, found.invalid, found.text),
    )


def _packed(values: array[Any], media: str) -> bytes | list[Any]:
    return _little_endian(values).tobytes() if media == MSGPACK else values.tolist()


def _unpacked(kind: str, raw: bytes | list[Any], name: str) -> array[Any]:
    if isinstance(raw, list):
        return array(kind, raw)
    if len(raw) % _ITEM_BYTES:
        raise WireError(f"{name} has {len(raw)} bytes, which is not a multiple of {_ITEM_BYTES}")
    values: array[Any] = array(kind)
    values.frombytes(raw)
    return _little_endian(values)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values
