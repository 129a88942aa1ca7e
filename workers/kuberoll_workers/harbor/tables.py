"""The base of the tables of task.toml, and types of their fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MOST_SECONDS = 365 * 86400


class Table(BaseModel):
    """A table of task.toml: fields that Harbor does not know are ignored, and values converted as Harbor does."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NotServed(ValueError):
    """A field says what Harbor accepts, and KubeRoll does not serve."""


def not_served(message: str) -> BeforeValidator:
    """A validator that refuses whatever stands in a field."""

    def refuse(_value: Any) -> Any:
        raise NotServed(message)

    return BeforeValidator(refuse)


def _variables(found: dict[str, str]) -> dict[str, str]:
    for name, value in found.items():
        if not name or "=" in name or "\0" in name + value:
            raise NotServed(f"{name!r} is no variable of a process: it is empty or has =, or there is a NUL in it")
    return found


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise NotServed("no command and no path can have the character NUL: remove it")
    return value


def _absolute(value: str) -> str | None:
    if value and not value.startswith("/"):
        raise NotServed(f"{value!r} is relative, and there is nothing to which: begin with /")
    return _without_nul(value) or None


Limit = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
"""A time limit in seconds."""
Wait = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
"""A time between two things, in seconds."""
Command = Annotated[str, AfterValidator(_without_nul)]
Directory = Annotated[str, AfterValidator(_absolute)]
"""A directory of the machine; an empty text is none."""
User = str | Annotated[int, Field(ge=0, le=2**32 - 2)]
"""A user's name, or number."""
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
"""Environment variables; a value `${NAME}` or `${NAME:-default}` is that of the worker's variable."""
