"""Response bodies in OpenAI's format, with token ids in vLLM's fields."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kuberoll_workers.policy.interface import GenerationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One generated sequence.

    Attributes:
        prompt: Index of its prompt.
        text: Without special tokens and the stop string, unless they were requested.
        pieces: The text of each token; None if log-probabilities were not requested.
    """

    prompt: int
    result: GenerationResult
    text: str
    pieces: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The results of a request, choices in the order of their prompts."""

    identity: str
    created: int
    model: str
    prompts: Sequence[array[int]]
    choices: Sequence[Choice]
    token_ids: bool

    def usage(self) -> dict[str, Any]:
        """Token counts; a prompt counts once, however many samples it has."""
        read = sum(len(prompt) for prompt in self.prompts)
        generated = sum(len(choice.result.token_ids) for choice in self.choices)
        cached = {choice.prompt: choice.result.cached_tokens for choice in reversed(self.choices)}
        return {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }


def chat_body(answer: Answer) -> dict[str, Any]:
    """The body of a chat completion."""
    return _body(answer, "chat.completion", [_chat_choice(answer, number) for number in range(len(answer.choices))]) | (
        {"prompt_token_ids": answer.prompts[0].tolist()} if answer.token_ids else {}
    )


def completion_body(answer: Answer) -> dict[str, Any]:
    """The body of a completion."""
    return _body(answer, "text_completion", [_text_choice(answer, number) for number in range(len(answer.choices))])


def _body(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer.identity,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": answer.usage(),
    }


def _chat_choice(answer: Answer, number: int) -> dict[str, Any]:
    choice = answer.choices[number]
    logprobs = None
    if choice.pieces is not None:
        content = [
            {"token": piece, "logprob": logprob, "bytes": _bytes(piece), "top_logprobs": []}
            for piece, logprob in zip(choice.pieces, choice.result.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": number,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.result.finish_reason,
        **_tokens(answer, choice),
    }


def _text_choice(answer: Answer, number: int) -> dict[str, Any]:
    choice = answer.choices[number]
    logprobs = None
    if choice.pieces is not None:
        ends = itertools.accumulate(map(len, choice.pieces), initial=0)
        logprobs = {
            "tokens": choice.pieces,
            "token_logprobs": choice.result.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": list(ends)[:-1],
        }
    prompt = {"prompt_token_ids": answer.prompts[choice.prompt].tolist()} if answer.token_ids else {}
    return {
        "index": number,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.result.finish_reason,
        **prompt,
        **_tokens(answer, choice),
    }


def _tokens(answer: Answer, choice: Choice) -> dict[str, Any]:
    if not answer.token_ids:
        return {}
    return {"token_ids": choice.result.token_ids.tolist(), "policy_versions": choice.result.policy_versions}


def _bytes(piece: str) -> list[int] | None:
    # The bytes of a token that ends inside a character cannot be derived from its text.
    return None if "\ufffd" in piece else list(piece.encode())


def chat_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A chat completion as the chunks of a stream: two for each choice, its message and its end."""
    common = _common(body, "chat.completion.chunk")
    first = {name: body[name] for name in ("prompt_token_ids",) if name in body}
    for choice in body["choices"]:
        message = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
        yield {
            **common,
            **first,
            "choices": [{**message, "delta": choice["message"], "finish_reason": None}],
        }
        first = {}
        end = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield {**common, "choices": [end]}


def completion_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A completion as the chunks of a stream, one for each choice."""
    for choice in body["choices"]:
        yield {**_common(body, "text_completion"), "choices": [choice]}


def events(body: dict[str, Any], chunks: Iterator[dict[str, Any]], *, usage: bool) -> Iterator[bytes]:
    """Server-sent events: the chunks, the usage if it was requested, and the end marker."""
    for chunk in chunks:
        yield _event(msgspec.json.encode({**chunk, "usage": None} if usage else chunk))
        last = chunk
    if usage:
        yield _event(msgspec.json.encode({**_common(body, last["object"]), "choices": [], "usage": body["usage"]}))
    yield _event(b"[DONE]")


def _common(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": body["id"], "object": kind, "created": body["created"], "model": body["model"]}


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
