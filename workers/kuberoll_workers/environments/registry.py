"""Registry: from the description of an environment in a RolloutJob to its object."""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import importlib
import io
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast, get_args

from kuberoll_api import plugins
from kuberoll_api.environment_types import (
    AGENT_TYPE,
    GYM_AGENT_TYPE,
    SANDBOX_AGENT_TYPE,
    BuiltInEnvironment,
    LibraryEnvironment,
)
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import Traceback, traceback_of
from kuberoll_workers.environments.hooks import Hooks, InvalidRecovery
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.ray_classes import is_ray_class, plain_class, start_ray, uses_ray

_TYPES = frozenset(
    {*get_args(BuiltInEnvironment), *get_args(LibraryEnvironment), AGENT_TYPE, GYM_AGENT_TYPE, SANDBOX_AGENT_TYPE}
)


def _registered(types: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in types if plugins.find(plugins.ENVIRONMENTS, name) is not None)


BUILT_INS: tuple[str, ...] = _registered(get_args(BuiltInEnvironment))
"""Values of `type` for environments of KubeRoll; the entry points `kuberoll.environments` have their classes."""

LIBRARIES: tuple[str, ...] = _registered(get_args(LibraryEnvironment))
"""Values of `type` for adapters of other libraries, which are imported when an environment is created."""

EnvironmentClass = type[EnvironmentInterface]
"""A class of environments, possibly by duck typing."""

# Everything that foreign code may raise, except KeyboardInterrupt, which is the user's.
_RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)

_METHODS = ("step", "global_post_process_and_metrics")


class UnusableEnvironment(ValueError):
    """The environment does not exist or cannot be created; the message names the remedy.

    Attributes:
        traceback: Of the exception that its module or constructor raised; None if it raised none.
    """

    def __init__(self, message: str, traceback: Traceback | None = None) -> None:
        super().__init__(message)
        self.traceback = traceback


class EnvironmentSpec(Protocol):
    """Fields of a RolloutJob's environment that `create` reads, as in `kuberoll_api.model.environments`."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str | None: ...
    @property
    def entrypoint(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PlainSpec:
    """An environment as plain data that can be sent to another process; calling it creates the environment.

    Attributes:
        config: Constructor argument, JSON types only.
    """

    name: str
    type: str | None
    entrypoint: str | None
    config: Mapping[str, Any]

    @classmethod
    def of(cls, spec: EnvironmentSpec) -> Self:
        if isinstance(spec, cls):
            return spec
        # Processes of environments get a plain one, and need not load the model.
        from kuberoll_api.model.environments import Environment

        if isinstance(spec, Environment):
            kind, entrypoint, config = spec.constructor
            return cls(name=spec.name, type=kind, entrypoint=entrypoint, config=config)
        return cls(name=spec.name, type=spec.type, entrypoint=spec.entrypoint, config=spec.config)

    def __call__(self) -> EnvironmentInterface:
        return create(self)


def resolve(*, type: str | None = None, entrypoint: str | None = None) -> EnvironmentClass:
    """Find the class of an environment.

    A class with the two methods of EnvironmentInterface need not derive from it, so environments written for other
    frameworks run unchanged. Of a class that is decorated with `@ray.remote`, it is the class behind the decorator.

    Args:
        type: Name of a built-in, or of an adapter.
        entrypoint: The user's own class, `package.module:Class`. Exactly one of the two must be given.

    Raises:
        UnusableEnvironment: The environment does not exist, or its module cannot be imported.
    """
    if (type is None) == (entrypoint is None):
        raise UnusableEnvironment("set exactly one of type (a built-in) and entrypoint (package.module:Class)")
    if type is not None:
        entrypoint = entrypoint_of(type)
        if entrypoint is None and type in _TYPES:
            raise UnusableEnvironment(f"type: {plugins.absence(plugins.ENVIRONMENTS, type)}")
        if entrypoint is None:
            raise UnusableEnvironment(
                f"type: there is no built-in environment {type!r}{_did_you_mean(type, [*BUILT_INS, *LIBRARIES])}; "
                f"the built-ins are {', '.join(sorted(BUILT_INS))}; the adapters for libraries are "
                f"{', '.join(sorted(LIBRARIES))}. Your own class goes into entrypoint"
            )
    assert entrypoint is not None
    found = plain_class(load(entrypoint))
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing or not callable(found):
        raise UnusableEnvironment(
            f"entrypoint: {entrypoint} is not an environment: it must be a class with {' and '.join(_METHODS)}; "
            f"missing: {', '.join(missing) or 'it is not a class'}"
        )
    return cast("EnvironmentClass", found)


def entrypoint_of(type: str) -> str | None:
    """Entrypoint of the environments of a type; None if no installed package has them."""
    found = plugins.find(plugins.ENVIRONMENTS, type)
    return None if found is None else found.value


def create(spec: EnvironmentSpec) -> EnvironmentInterface:
    """Create the environment of a job.

    Raises:
        UnusableEnvironment: It cannot be found, or as in `instantiate`.
    """
    plain = PlainSpec.of(spec)
    try:
        return instantiate(resolve(type=plain.type, entrypoint=plain.entrypoint), plain.config)
    except UnusableEnvironment as error:
        raise UnusableEnvironment(f"environment {spec.name!r}: {error}", error.traceback) from error


def instantiate(environment: EnvironmentClass, config: Mapping[str, Any]) -> EnvironmentInterface:
    """Create an environment of a class, with its own copy of the config.

    Raises:
        UnusableEnvironment: Its constructor raised an exception, or its `recovery` is none.
    """
    _print_anything()
    try:
        if is_ray_class(environment) and uses_ray(environment):
            start_ray()
        made = environment(copy.deepcopy(dict(config)))  # type: ignore[call-arg]
        Hooks.of(made)
    except UnusableEnvironment:
        raise
    except InvalidRecovery as error:
        raise UnusableEnvironment(str(error)) from error
    except _RAISED as error:
        raise UnusableEnvironment(
            f"its constructor raised {type(error).__name__}: {message_of(error)}", traceback_of(error)
        ) from error
    return made


def _print_anything() -> None:
    """Have characters that the output has no code for printed as escapes: what an environment prints is no failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def load(entrypoint: str) -> Any:
    """Import what an entrypoint names, `package.module:attribute`.

    Raises:
        UnusableEnvironment: It cannot be imported.
    """
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise UnusableEnvironment(f"entrypoint: {entrypoint!r} is not of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        absent, traceback = error.name or module_name, None
        if module_name == absent or module_name.startswith(f"{absent}."):
            reason = f"there is no module {absent!r}; install it, or put its directory on PYTHONPATH"
        else:
            reason, traceback = f"it needs the module {absent!r}, which is not installed", traceback_of(error)
        raise UnusableEnvironment(f"entrypoint: {entrypoint} cannot be imported: {reason}", traceback) from error
    except _RAISED as error:
        raise UnusableEnvironment(
            f"entrypoint: {entrypoint} cannot be imported: {type(error).__name__}: {message_of(error)}",
            traceback_of(error),
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), cast("Any", module))
    except AttributeError as error:
        raise UnusableEnvironment(
            f"entrypoint: the module {module_name} has no {attribute!r}{_did_you_mean(attribute, dir(module))}"
        ) from error


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
