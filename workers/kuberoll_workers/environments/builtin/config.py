"""Configs of the built-in environments: strict models, with errors that name the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from kuberoll_api.model.types import Model
from kuberoll_workers.environments.registry import UnusableEnvironment


class EnvironmentConfig(Model):
    """Base of the configs: as the manifest's models, camelCase keys, no unknown keys, no conversions."""


_Config = TypeVar("_Config", bound=EnvironmentConfig)


def parse_config(model: type[_Config], config: Mapping[str, Any] | None) -> _Config:
    """Validate an environment's config.

    Raises:
        UnusableEnvironment: One sentence per mistake, each naming its key.
    """
    try:
        return model.model_validate({} if config is None else dict(config))
    except ValidationError as error:
        allowed = [to_camel(name) for name in model.model_fields]
        raise UnusableEnvironment("; ".join(_explain(detail, allowed) for detail in error.errors())) from error


def _explain(detail: Any, allowed: list[str]) -> str:
    path = ".".join(map(str, ("config", *detail["loc"])))
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(detail["loc"][-1]), allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{path}: unknown; {hint}allowed are {', '.join(allowed)}"
    if detail["type"] == "value_error":
        return f"{path}: {detail['ctx']['error']}"
    return f"{path}: found {detail['input']!r}; {detail['msg'][0].lower()}{detail['msg'][1:]}"
