"""Optional methods of an environment's class: which ones it has, and how its episodes recover."""

from __future__ import annotations

from typing import Any, Self, get_args

import msgspec

from kuberoll_workers.environments.interface import EnvironmentInterface, Recovery


class InvalidRecovery(ValueError):
    """The class names a recovery that does not exist."""


class Hooks(msgspec.Struct, array_like=True, frozen=True):
    """Optional methods that an environment has.

    Attributes:
        recovery: How an episode goes on when its instance is gone.
        score_group: It scores prompt groups.
        declares_tools: `reset` declares tools in every episode.
        prepare: It prepares episodes before they begin.
        prepare_ahead: How many at most; None: it does not say.
        trials: It has `solution` or `attacks`, or says what the full reward is.
    """

    reset: bool = False
    close: bool = False
    shutdown: bool = False
    recovery: Recovery = "metadata"
    score_group: bool = False
    declares_tools: bool = False
    prepare: bool = False
    prepare_ahead: int | None = None
    trials: bool = False

    @property
    def episodic(self) -> bool:
        """True if the environment must know when an episode begins and ends."""
        return self.reset or self.close or self.stateful

    @property
    def stateful(self) -> bool:
        """True if an episode can only be stepped by the instance that reset it."""
        return self.recovery != "metadata"

    @classmethod
    def of(cls, environment: Any) -> Self:
        """Hooks of an environment's object; neither methods of `EnvironmentInterface` nor those set to None count.

        Raises:
            InvalidRecovery: Its `recovery` is none.
        """
        recovery: Any = getattr(environment, "recovery", "metadata")
        if recovery not in get_args(Recovery):
            raise InvalidRecovery(
                f"{type(environment).__name__}.recovery is {recovery!r}; it must be one of "
                f"{', '.join(map(repr, get_args(Recovery)))}"
            )
        return cls(
            reset=_has(environment, "reset"),
            close=_has(environment, "close"),
            shutdown=_has(environment, "shutdown"),
            recovery=recovery,
            score_group=_has(environment, "score_group"),
            declares_tools=getattr(environment, "declares_tools", False) is True,
            prepare=_has(environment, "prepare"),
            prepare_ahead=getattr(environment, "prepare_ahead", None),
            trials=_has(environment, "solution")
            or _has(environment, "attacks")
            or getattr(environment, "full_reward", None) is not None,
        )


NO_HOOKS = Hooks()


def _has(environment: Any, name: str) -> bool:
    method = getattr(type(environment), name, None)
    own = callable(method) and method is not getattr(EnvironmentInterface, name)
    # An instance may be without a method of its class, which it says as Python's own protocols do: by None.
    return own and getattr(environment, name) is not None
