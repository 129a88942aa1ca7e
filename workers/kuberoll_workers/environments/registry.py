"""From what a RolloutJob says about an environment to the object that answers."""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from kuberoll_workers.data.plain import message_of
from kuberoll_workers.environments.interface import EnvironmentInterface

BUILT_INS: Mapping[str, str] = {
    "calculator": "kuberoll_workers.environments.builtin.calculator:CalculatorEnvironment",
    "math": "kuberoll_workers.environments.builtin.math.answers:MathAnswersEnvironment",
    "sliding_puzzle": "kuberoll_workers.environments.builtin.sliding_puzzle:SlidingPuzzleEnvironment",
}
"""Built-in environments by `type`. Modules are imported only when they are asked for."""

EnvironmentClass = type[EnvironmentInterface]
"""A class of environments; it may only look like one."""

# All that somebody's code may raise; Ctrl-C is the user's own.
_RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)

_METHODS = ("step", "global_post_process_and_metrics")


class UnusableEnvironment(ValueError):
    """The job asks for an environment that is not there or cannot be made; the message says what to do."""


class EnvironmentSpec(Protocol):
    """What `create` reads of a RolloutJob's environment (`kuberoll_api.model.environments.Environment` is one)."""

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
    """An environment as plain data, which can be sent to another process; called, it makes the environment.

    Attributes:
        config: JSON types only.
    """

    name: str
    type: str | None
    entrypoint: str | None
    config: Mapping[str, Any]

    @classmethod
    def of(cls, spec: EnvironmentSpec) -> Self:
        return cls(name=spec.name, type=spec.type, entrypoint=spec.entrypoint, config=spec.config)

    def __call__(self) -> EnvironmentInterface:
        return create(self)


def resolve(*, type: str | None = None, entrypoint: str | None = None) -> EnvironmentClass:
    """The class of an environment.

    A class need not derive from EnvironmentInterface: having its two methods is enough, so that environments written
    for other frameworks run unchanged.

    Args:
        type: Name of a built-in.
        entrypoint: The user's own class, `package.module:Class`. Exactly one of the two is given.

    Raises:
        UnusableEnvironment: There is no such environment, or its module cannot be imported.
    """
    if (type is None) == (entrypoint is None):
        raise UnusableEnvironment("set exactly one of type (a built-in) and entrypoint (package.module:Class)")
    if type is not None:
        if type not in BUILT_INS:
            raise UnusableEnvironment(
                f"type: there is no built-in environment {type!r}{_did_you_mean(type, BUILT_INS)}; "
                f"the built-ins are {', '.join(sorted(BUILT_INS))}. Your own class goes into entrypoint"
            )
        entrypoint = BUILT_INS[type]
    assert entrypoint is not None
    found = _load(entrypoint)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing or not callable(found):
        raise UnusableEnvironment(
            f"entrypoint: {entrypoint} is no environment: it must be a class with {' and '.join(_METHODS)}; "
            f"missing: {', '.join(missing) or 'it is not a class'}"
        )
    return cast("EnvironmentClass", found)


def create(spec: EnvironmentSpec) -> EnvironmentInterface:
    """Make the environment of a job.

    Raises:
        UnusableEnvironment: It cannot be found, or its constructor refused the config.
    """
    try:
        return resolve(type=spec.type, entrypoint=spec.entrypoint)(copy.deepcopy(dict(spec.config)))  # type: ignore[call-arg]
    except UnusableEnvironment as error:
        raise UnusableEnvironment(f"environment {spec.name!r}: {error}") from error
    except _RAISED as error:
        raise UnusableEnvironment(
            f"environment {spec.name!r}: its constructor raised {type(error).__name__}: {message_of(error)}"
        ) from error


def _load(entrypoint: str) -> Any:
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise UnusableEnvironment(f"entrypoint: {entrypoint!r} is not of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        absent = error.name or module_name
        if module_name == absent or module_name.startswith(f"{absent}."):
            reason = f"there is no module {absent!r}; install it, or put its directory on PYTHONPATH"
        else:
            reason = f"it needs the module {absent!r}, which is not installed"
        raise UnusableEnvironment(f"entrypoint: {entrypoint} cannot be imported: {reason}") from error
    except _RAISED as error:
        raise UnusableEnvironment(
            f"entrypoint: {entrypoint} cannot be imported: {type(error).__name__}: {message_of(error)}"
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
