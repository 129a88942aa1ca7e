"""Calls of tools that a request demands: vLLM has some models write them as plain JSON, and not in their own form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kuberoll_workers.data.tool_calls import InvalidCall, checked_call
from kuberoll_workers.data.tools import ToolCall

_ANY = ("required", "any")
_NAMED = ("function", "tool")


def demand_of(body: Mapping[str, Any]) -> str | None:
    """The function that a request's `tool_choice` demands, in the form of any API; empty: any; None: none."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        return "" if choice in _ANY else None
    kind, function = choice.get("type"), choice.get("function")
    if kind in _ANY:
        return ""
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return str(name) if kind in _NAMED and name else None


def read_demanded(text: str, demand: str) -> list[ToolCall]:
    """Calls in a response that is plain JSON; none if it cannot be read, as when it was cut off.

    Args:
        text: The arguments of the demanded function, or, if any is demanded, a list of calls `{"name", "parameters"}`.
    """
    try:
        value = msgspec.json.decode(text.strip())
        pairs = [(demand, value)] if demand else [(call["name"], call.get("parameters")) for call in value]
        return [checked_call(name, arguments) for name, arguments in pairs]
    except (msgspec.DecodeError, InvalidCall, TypeError, KeyError, AttributeError, RecursionError):
        return []
