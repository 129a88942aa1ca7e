"""Limits of requests to vLLM's API, checked before its own parsing: a caller can't slow other callers down."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kuberoll_api.model.chat_template import RESERVED_VARIABLES
from kuberoll_workers.policy.forms import check_grammar, check_schema
from kuberoll_workers.policy.interface import MAX_STOPS

MAX_SEQUENCES: Final = 128
"""Sequences that one request may ask for: its prompts times `n`."""

MAX_CHARACTERS: Final = 4 << 20
"""Maximum characters of a request's texts together: about a million tokens."""

MAX_ITEMS: Final = {"messages": 10_000, "input": 10_000, "tools": 1_000, "prompt": 1 << 23, "tokens": 1 << 23}
"""Maximum length of a request's lists that may be long."""

MAX_OTHER_ITEMS: Final = 1024
"""Maximum number of items of every other list and object that a field of a request is or has."""

MAX_OTHER_CHARACTERS: Final = 1 << 16
"""Maximum characters of every text of the fields that are not texts of a prompt."""

MAX_DEPTH: Final = 64
MAX_NODES: Final = 1 << 20
"""Bounds of all values of a request's fields that are not token ids."""

_STOPS: Final = ("stop", "stop_sequences", "stop_token_ids", "bad_words", "bad_words_token_ids")
_TEXTS: Final = ("messages", "input", "prompt", "system", "instructions", "tools")

# vLLM ignores these, though they would change what is generated. Values that have no effect are accepted.
_IGNORED: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
}
# Sampling of another kind than trajectories are made of; and what takes the alternatives (`top_logprobs`) from all
# other requests of its batch, as vLLM gathers either one or the other for a whole batch (0.32).
_REFUSED: Final = {
    "use_beam_search": (False,),
    "background": (False,),
    "previous_response_id": (),
    "logprob_token_ids": (),
}
_MEDIA: Final = ("image", "audio", "video", "file")


class InvalidRequest(Exception):
    """A request that is refused, with the fields of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the model can be asked for.

    Attributes:
        renders_tools: Its chat template writes tools into the prompt.
        parses_calls: Its tool parser is configured.
    """

    renders_tools: bool
    parses_calls: bool


def check_request(body: bytes, abilities: Abilities) -> dict[str, Any]:
    """Check a request's body; return it decoded.

    Raises:
        InvalidRequest: It is not a JSON object, or beyond a limit; the message names the field.
    """
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is not JSON that can be read: it is nested too deeply") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f"the body is not a JSON object, but {type(request).__name__}")
    _check_fields(request)
    _check_sequences(request)
    _check_sizes(request)
    _check_forms(request)
    _check_variables(request.get("chat_template_kwargs"))
    _check_messages(request.get("messages"))
    for name in _TEXTS:
        _check_texts(request.get(name), name)
    if request.get("tools") and request.get("tool_choice") != "none":
        _check_tools(abilities)
    return request


def _check_fields(request: Mapping[str, Any]) -> None:
    for name, neutral in (*_IGNORED.items(), *_REFUSED.items()):
        if (given := request.get(name)) is not None and given not in neutral:
            raise InvalidRequest(
                f"{name}: {reprlib.repr(given)} is not supported by this server; leave it out", param=name
            )


def _check_sizes(request: Mapping[str, Any]) -> None:
    """Check the size of every field, so that none need be known here: lists that may be long are named."""
    if len(request) > MAX_OTHER_ITEMS:
        raise InvalidRequest(f"the body has {len(request):,} fields; the maximum is {MAX_OTHER_ITEMS:,}")
    left = MAX_NODES
    for name, field in request.items():
        if len(name) > MAX_OTHER_CHARACTERS:
            raise InvalidRequest(f"{name[:100]}…: a field's name has {len(name):,} characters")
        if isinstance(field, list) and len(field) > (most := _most_items(name)):
            raise InvalidRequest(f"{name}: {len(field):,} items; the maximum is {most:,}", param=name)
        if _is_tokens(name, field):
            continue
        left = _check_values(name, field, left)


def _most_items(name: str) -> int:
    return MAX_STOPS if name in _STOPS else MAX_ITEMS.get(name, MAX_OTHER_ITEMS)


def _is_tokens(name: str, field: Any) -> bool:
    return name in ("prompt", "tokens") and isinstance(field, list) and set(map(type, field)) == {int}


def _check_values(name: str, field: Any, left: int) -> int:
    """Check the values inside a field; returns how many more there may be."""
    rest = [(field, 0)]
    long = name in _TEXTS
    while rest:
        value, depth = rest.pop()
        left -= 1
        if left < 0:
            raise InvalidRequest(f"{name}: the request has more than {MAX_NODES:,} values", param=name)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name}: it is nested deeper than {MAX_DEPTH}", param=name)
        if isinstance(value, str):
            if not long and len(value) > MAX_OTHER_CHARACTERS:
                raise InvalidRequest(
                    f"{name}: a text of {len(value):,} characters; the maximum is {MAX_OTHER_CHARACTERS:,}", param=name
                )
        elif isinstance(value, dict | list):
            # The lists of token ids in a list of prompts, and of parts in a message.
            most = MAX_ITEMS.get(name, MAX_OTHER_ITEMS)
            if len(value) > most:
                raise InvalidRequest(f"{name}: {len(value):,} items; the maximum is {most:,}", param=name)
            if isinstance(value, dict):
                rest += [(key, depth + 1) for key in value]
            # The count is checked before anything is copied.
            if len(value) > left:
                raise InvalidRequest(f"{name}: the request has more than {MAX_NODES:,} values", param=name)
            rest += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]
    return left


def _check_forms(request: Mapping[str, Any]) -> None:
    """Check schemas and grammars that a response must have the form of."""
    form, output = request.get("structured_outputs"), request.get("response_format")
    text = request.get("text")
    if output is None and isinstance(text, dict):
        output = text.get("format")
    try:
        if isinstance(form, dict):
            if isinstance(form.get("json"), dict):
                check_schema(form["json"], "structured_outputs.json")
            if isinstance(form.get("grammar"), str):
                check_grammar(form["grammar"], "structured_outputs.grammar")
        if isinstance(output, dict):
            outer = output.get("json_schema", output)
            if isinstance(outer, dict) and isinstance(outer.get("schema"), dict):
                check_schema(outer["schema"], "response_format")
        for number, tool in enumerate(tools if isinstance(tools := request.get("tools"), list) else ()):
            if isinstance(tool, dict):
                function = tool.get("function")
                described = function if isinstance(function, dict) else tool
                check_schema(described.get("parameters", described.get("input_schema")), f"tools[{number}]")
    except ValueError as error:
        raise InvalidRequest(str(error), param=str(error).partition(":")[0]) from error


def _check_sequences(request: Mapping[str, Any]) -> None:
    prompt, samples = request.get("prompt"), request.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if prompts * (samples if isinstance(samples, int) else 1) > MAX_SEQUENCES:
        raise InvalidRequest(f"n: prompts times n must not exceed {MAX_SEQUENCES} sequences", param="n")


def _check_variables(variables: object) -> None:
    for name in variables if isinstance(variables, dict) else ():
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise InvalidRequest(
                f"chat_template_kwargs.{name[:100]}: callers may not set this variable; the model's own template is "
                "used, and some of its variables are fields of the request (tools, add_generation_prompt)",
                param="chat_template_kwargs",
            )


def _check_messages(messages: object) -> None:
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if calls is not None and not isinstance(calls, list):
            where = f"messages[{number}].tool_calls"
            raise InvalidRequest(f"{where}: send a list of calls, not {type(calls).__name__}", param=where)


def _check_texts(value: object, param: str) -> None:
    """Check the texts inside a field: their length together, and that no part is of another medium."""
    characters = 0
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            characters += len(item)
            if characters > MAX_CHARACTERS:
                raise InvalidRequest(
                    f"{param}: {characters:,} characters; the maximum is {MAX_CHARACTERS:,}", param=param
                )
        elif isinstance(item, list):
            rest.extend(item)
        elif isinstance(item, dict):
            kind = item.get("type")
            if param != "tools" and isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
                raise InvalidRequest(f"{param}: only parts of type text are supported, not {kind[:100]}", param=param)
            rest.extend(item.values())


def _check_tools(abilities: Abilities) -> None:
    if not abilities.renders_tools:
        raise InvalidRequest(
            "tools: the model's chat template leaves them out, so the model would not see them; "
            "describe them in a message, or use a model whose template renders tools",
            param="tools",
        )
    if not abilities.parses_calls:
        raise InvalidRequest(
            "tools: calls in responses are not parsed, because the job names no parser; set "
            "spec.generation.toolCallParser to the model's (hermes, llama3_json, …), or send tool_choice: none",
            param="tools",
        )
