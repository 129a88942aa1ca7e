"""Chat templates: Jinja as transformers reads it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The environment that Hugging Face documents for chat templates, and the tag that transformers adds to it."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, around what the model writes: it marks a part for trainers, and renders it unchanged."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # With a scope of its own, as transformers renders it.
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """A template that is ready to render.

    Raises:
        jinja2.TemplateSyntaxError: It is not Jinja; Python's compiler has further errors for what is nested too deeply.
    """
    return _environment().from_string(template)


def template_variables(template: object) -> set[str] | None:
    """Variables that a chat template reads and does not set itself; None if that cannot be known."""
    if not isinstance(template, str):
        return None
    import jinja2
    import jinja2.meta

    try:
        return jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError:
        # With extensions of the model's own.
        return None


def stopped_clock(moment: datetime) -> Callable[[str], str]:
    """A chat template's `strftime_now` at a clock that stands."""
    # As transformers' own has none.
    return moment.replace(tzinfo=None).strftime


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
