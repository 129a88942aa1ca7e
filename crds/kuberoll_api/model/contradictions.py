"""Mistakes of several fields together."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError


def contradiction(message: str, *path: str | int) -> PydanticCustomError:
    """A mistake of several fields together; the path leads, from the model that finds it, to the one to change."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "path": path})


def refuse_twins(names: list[Any], field: str, key: str) -> None:
    """Raises a contradiction where two items of a list have the same name."""
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            message = f'found "{name}", the {key} of {field}[{first}] too; no two may have the same'
            raise contradiction(message, field, index, key)
