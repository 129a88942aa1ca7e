"""MCP servers that a task gives its agent."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kuberoll_workers.harbor.tables import Table

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^}]*))?\}")
# Names of headers and variables that hold credentials.
_SECRET = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
_COOKIES = ("cookie", "set-cookie")
# `Bearer ${TOKEN}`, `Basic ${USER}:${PASSWORD}`.
_REFERENCE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-)?\}"
_ONLY_REFERENCES = re.compile(rf"\s*([A-Za-z]+\s+)?{_REFERENCE}([\s:-]*{_REFERENCE})*\s*")


class McpServer(Table):
    """A server of tools; at a URL, or a program in the machine.

    Attributes:
        headers: Of requests; `${VARIABLE}` stands for a variable of the worker, and credentials only stand so.
    """

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    headers: dict[str, str] = Field(default_factory=dict)

    @field_validator("transport", mode="before")
    @classmethod
    def _http(cls, value: object) -> object:
        return "streamable-http" if value == "http" else value

    @field_validator("headers")
    @classmethod
    def _usable(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if (problem := _problem(name, value)) is not None:
                raise ValueError(f"{name!r}: {problem}")
        return headers

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("a server of the transport stdio is a program: give its command")
            if self.headers:
                raise ValueError("a program (transport stdio) gets no headers: remove them")
        elif not self.url:
            raise ValueError(f"a server of the transport {self.transport} needs a url")
        return self


def _problem(name: str, value: str) -> str | None:
    """What is wrong with a header; None if nothing is."""
    if not _HEADER_NAME.fullmatch(name):
        return "this is no name of a header"
    if "\r" in value or "\n" in value:
        return "the value has several lines"
    variables = list(_VARIABLE.finditer(value))
    defaults = [found["default"] or "" for found in variables]
    if "${" in _VARIABLE.sub(" ", value) or any("${" in default for default in defaults):
        return "a variable is written ${NAME} or ${NAME:-default}"
    secret = bool(_SECRET.search(name)) or name.lower() in _COOKIES
    in_the_open = any(found["default"] and (secret or _SECRET.search(found["name"])) for found in variables)
    if in_the_open or (secret and value.strip() and not _ONLY_REFERENCES.fullmatch(value)):
        return "a credential stands in the file; write ${VARIABLE} in its place, without a default: Bearer ${TOKEN}"
    return None
