"""Parsing and validation of requests to the OpenAI-compatible API."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from kuberoll_api.model.chat_template import RESERVED_VARIABLES
from kuberoll_workers.policy.interface import MAX_PENALTY, MAX_SEED, SamplingParameters, StructuredOutputs, TokenId

MAX_SEQUENCES = 128
"""Sequences that one request may ask for: its prompts times `n`."""

MAX_CHARACTERS: Final = 4 << 20
"""Maximum characters of a request's texts together, and of a rendered chat: about a million tokens."""

MAX_MESSAGES: Final = 10_000
MAX_TOOLS: Final = 1_000

_DEFAULT_COMPLETION_TOKENS = 16

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Word = Annotated[str, msgspec.Meta(min_length=1)]

# Unsupported fields that would change what is generated, with the values that are accepted because they have no effect.
# Other unknown fields are ignored, since clients send many that do not matter here.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class InvalidRequest(Exception):
    """An invalid request, with the fields of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """OpenAI's `response_format.json_schema`; its other fields only name and describe the schema."""

    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured(self) -> StructuredOutputs | None:
        """The form that a response must have; None: any.

        Raises:
            InvalidRequest: It lacks its schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json={"type": "object"})
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema is missing", param="response_format.json_schema")
        return StructuredOutputs(json=self.json_schema.schema)


class _Common(msgspec.Struct, kw_only=True):
    # Clients send null for fields that they leave to the server.
    model: str | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stop: _Word | list[_Word] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=MAX_PENALTY)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def structured(self) -> StructuredOutputs | None:
        """The form that a response must have, by OpenAI's field or by vLLM's; None: any.

        Raises:
            InvalidRequest: Both fields ask for one.
        """
        asked = None if self.response_format is None else self.response_format.structured()
        if asked is not None and self.structured_outputs is not None:
            raise InvalidRequest("response_format and structured_outputs: send one of them", param="response_format")
        return asked or self.structured_outputs

    @property
    def samples(self) -> int:
        """Number of samples of each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def limit(self, room: int) -> int:
        """Maximum number of tokens to generate, of the `room` that the prompt leaves."""
        raise NotImplementedError

    def sampling(self, sample: int, room: int) -> SamplingParameters:
        """Sampling parameters of one sample; with a seed each sample has its own.

        Args:
            sample: Index of the sample among those of its prompt.
            room: Number of tokens that the window has left after the prompt.
        """
        return SamplingParameters(
            max_tokens=self.limit(room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # Some clients send 0 for all tokens.
            top_k=self.top_k or -1,
            seed=None if self.seed is None else (self.seed + sample) & MAX_SEED,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            structured_outputs=self.structured,
        )

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError


class ChatRequest(_Common, kw_only=True):
    """The supported fields of the body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def limit(self, room: int) -> int:
        requested = self.max_completion_tokens or self.max_tokens
        return room if requested is None else min(requested, room)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class CompletionRequest(_Common, kw_only=True):
    """The supported fields of the body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    add_special_tokens: bool | None = None

    def limit(self, room: int) -> int:
        return min(self.max_tokens or _DEFAULT_COMPLETION_TOKENS, room)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids, as a list.

        Raises:
            InvalidRequest: `prompt` has another type or is empty.
        """
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(_is_token(item) for item in given):
            return [given]
        if given and all(isinstance(item, str) or _are_tokens(item) for item in given):
            return given
        raise InvalidRequest(
            "prompt: send a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
            param="prompt",
        )


_Body = TypeVar("_Body", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[_Body]) -> _Body:
    """Parse and check a body.

    Raises:
        InvalidRequest: A field is wrong or not supported; the message names it.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=_field(str(error))) from error
    for name, neutral in _NEUTRAL_VALUES.items():
        if (given := raw.get(name)) is not None and given not in neutral:
            raise InvalidRequest(
                f"{name}: {reprlib.repr(given)} is not supported by this server; leave it out", param=name
            )
    _check_logprobs(request)
    # Raises what is wrong with it before anything is tokenized.
    _ = request.structured
    if isinstance(request, ChatRequest):
        _check_variables(request.chat_template_kwargs or {})
    return request


def _check_logprobs(request: ChatRequest | CompletionRequest) -> None:
    chat = isinstance(request, ChatRequest)
    alternatives = request.top_logprobs if isinstance(request, ChatRequest) else request.logprobs
    # In completions, callers send 1 to get the sampled token's log-probability.
    if (alternatives or 0) > (0 if chat else 1):
        name = "top_logprobs" if chat else "logprobs"
        raise InvalidRequest(
            f"{name}: {alternatives} requests log-probabilities of other tokens, but only that of the sampled token "
            f"is available; set {name} to 0",
            param=name,
        )


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise InvalidRequest(
                f"chat_template_kwargs.{name[:100]}: callers may not set this variable; the model's own template is "
                "used, and some of its variables are fields of the request (tools, add_generation_prompt)",
                param="chat_template_kwargs",
            )


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31


def _are_tokens(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(_is_token(value) for value in item)


def _field(message: str) -> str | None:
    """Extract the field from msgspec's message: `… - at `$.messages[0]`` or `… missing required field `prompt``."""
    _, found, path = message.partition("`$.")
    if found:
        return path.rstrip("`")
    _, found, name = message.partition("required field `")
    return name.partition("`")[0] if found else None


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for chat templates: text parts are joined, and JSON arguments of tool calls are decoded.

    Raises:
        InvalidRequest: A message has no role, or parts that are not text, or the messages together are too long.
    """
    converted = [_chat_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    check_characters(sum(len(message["content"]) for message in converted), "messages")
    return converted


def check_characters(count: int, param: str) -> None:
    """Check the length of a text before it is encoded.

    Raises:
        InvalidRequest: It has more than `MAX_CHARACTERS` characters.
    """
    if count > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{param}: {count:,} characters; the maximum is {MAX_CHARACTERS:,}",
            param=param,
            code="context_length_exceeded",
        )


def _chat_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role is missing", param=f"{where}.role")
    plain = {**message, "content": _text(message.get("content"), f"{where}.content")}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls: send a list", param=f"{where}.tool_calls")
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return plain


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: send a text or a list of parts", param=where)
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{number}]: only parts of type text are supported", param=where)
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = msgspec.json.decode(arguments or "{}")
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{where}: function.arguments must be JSON: {error}", param=where) from error
    return {**call, "function": function}
