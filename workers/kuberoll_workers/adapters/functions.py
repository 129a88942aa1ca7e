"""Functions that an environment's config names, as `package.module:function`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from kuberoll_workers.environments.registry import UnusableEnvironment


def function_of(name: str, key: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: `package.module:function`.
        key: The config's key, for messages.

    Raises:
        UnusableEnvironment: There is none of this name.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise UnusableEnvironment(
            f"{key}: {name} cannot be imported: {error}. It must be package.module:function, in the working directory, "
            "beside the manifest, or installed"
        ) from error
    if not callable(found):
        raise UnusableEnvironment(f"{key}: {name} is not a function")
    return found
