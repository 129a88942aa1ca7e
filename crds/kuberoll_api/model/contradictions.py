"""Validation errors that concern several fields."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError


def contradiction(message: str, *path: str | int) -> PydanticCustomError:
    """Validation error of several fields; `path` leads from the validated model to the field to change."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "path": path})


def reject_duplicates(names: list[Any], field: str, key: str, *above: str | int) -> None:
    """Raise a contradiction if two items of a list have the same name; None is no name.

    Args:
        above: Path from the validated model to what the list is in.
    """
    for index, name in enumerate(names):
        if name is not None and (first := names.index(name)) < index:
            message = f'found "{name}", the {key} of {field}[{first}] too; no two may have the same'
            raise contradiction(message, *above, field, index, key)
