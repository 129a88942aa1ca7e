"""Tools of a chat: their schemas, and calls of them, in the form of OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.data.plain import NotPlain, bare, plain, repr_of

Tool = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`; `parameters` is a JSON schema."""

ToolCall = dict[str, Any]
"""`{"id", "type": "function", "function": {"name", "arguments"}}`; `arguments` is a JSON object as text."""

MAX_TOOLS = 1000
"""Maximum number of tools of a chat."""
MAX_TOOLS_BYTES = 1 << 20
"""Maximum size of a chat's tools, in bytes of their JSON text: they are in every prompt, and in every trajectory."""
MAX_NAME = 256
"""Maximum length of a tool's name, and of a call's id, in characters."""

_FUNCTION_FIELDS = ("name", "description", "parameters")


class InvalidTools(ValueError):
    """Tools or calls are not in a supported form; the message begins with the field."""


def checked_tools(tools: Any, where: str) -> list[Tool]:
    """A copy of a list of tools, in the form of the chat API.

    The form of the Responses API, whose function has no object of its own (`{"type": "function", "name", ...}`), is
    converted: name, description and parameters are taken. A tool in the chat API's form keeps all of its fields.

    Args:
        where: Name of the list for errors.

    Raises:
        InvalidTools: It is not a list of functions with different names.
    """
    if not isinstance(tools, list | tuple):
        raise InvalidTools(f"{where}: found {repr_of(tools)}; it must be a list of functions")
    if len(tools) > MAX_TOOLS:
        raise InvalidTools(f"{where}: found {len(tools)} tools; at most {MAX_TOOLS} are taken")
    try:
        # A schema is the same from every file format, and a template writes it as it is.
        copied = bare(plain(list(tools), where, max_bytes=MAX_TOOLS_BYTES))
    except NotPlain as error:
        raise InvalidTools(str(error)) from error
    checked = [_checked_tool(tool, f"{where}[{number}]") for number, tool in enumerate(copied)]
    names: dict[str, int] = {}
    for number, tool in enumerate(checked):
        name = tool["function"]["name"]
        if names.setdefault(name, number) != number:
            raise InvalidTools(f"{where}[{number}]: {name!r} is already the name of {where}[{names[name]}]")
    return checked


def _checked_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidTools(f"{where}: found {repr_of(tool)}; a tool is an object with type and function")
    kind = tool.get("type")
    if kind != "function":
        raise InvalidTools(f"{where}.type: found {repr_of(kind)}; only tools of type 'function' can be rendered")
    nested = "function" in tool
    function = tool["function"] if nested else {key: tool[key] for key in _FUNCTION_FIELDS if key in tool}
    where = f"{where}.function" if nested else where
    if not isinstance(function, dict):
        raise InvalidTools(f"{where}: found {repr_of(function)}; it must be an object with a name")
    _check_name(function.get("name"), f"{where}.name")
    if not isinstance(function.get("description", ""), str):
        raise InvalidTools(f"{where}.description: found {repr_of(function['description'])}; it must be text")
    if not isinstance(function.get("parameters", {}), dict):
        raise InvalidTools(f"{where}.parameters: found {repr_of(function['parameters'])}; it must be a JSON schema")
    return {**tool, "function": function} if nested else {"type": "function", "function": function}


def checked_calls(calls: Any, where: str) -> list[ToolCall]:
    """A copy of the tool calls of an assistant's message; arguments that are an object become text.

    Raises:
        InvalidTools: They are not calls of functions.
    """
    if not isinstance(calls, list | tuple):
        raise InvalidTools(f"{where}: found {repr_of(calls)}; it must be a list of calls")
    return [_checked_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _checked_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidTools(f"{where}: found {repr_of(call)}; a call is an object with id, type and function")
    _check_name(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    try:
        arguments = (
            json.loads(arguments or "{}") if isinstance(arguments, str | None) else bare(plain(arguments, where))
        )
    except ValueError as error:
        raise InvalidTools(f"{where}.function.arguments: {error}; they must be a JSON object") from error
    if not isinstance(arguments, dict):
        raise InvalidTools(f"{where}.function.arguments: found {repr_of(arguments)}; they must be a JSON object")
    made = tool_call(function["name"], arguments)
    if call.get("id") is not None:
        _check_name(call["id"], f"{where}.id")
        made = {"id": call["id"], **made}
    return made


def tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """A call without an id."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": text}}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as chat templates expect them: with the arguments of tool calls as objects."""
    return [_template_message(message) if "tool_calls" in message else dict(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [_template_call(call) for call in message["tool_calls"]]}


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidTools(f"{where}: found {repr_of(name)}; it must be a text of 1 to {MAX_NAME} characters")
