"""Right and wrong answers of a row, as an environment's `solution` and `attacks` return them, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kuberoll_workers.data.plain import NotPlain, plain, repr_of, unicode_text
from kuberoll_workers.environments.interface import ChatMessage, Trials
from kuberoll_workers.environments.outcome import EnvironmentFault, StepInvalid

MAX_TRIALS: Final = 256
"""Most solutions, and most attacks, of a row."""
MAX_TURNS: Final = 1024
"""Most responses of one of them."""
MAX_NAME: Final = 100
"""Maximum length of a name, in characters."""

ONLY: Final = "solution"
"""Name of the solution of an environment that gives one without a name."""


def split_trials(returned: Any) -> list[Trials | EnvironmentFault]:
    """Validate what the two methods returned, and the attribute `full_reward`, for each episode."""
    found: list[Trials | EnvironmentFault] = []
    for solution, attacks, full in returned:
        try:
            found.append(
                check_trials(
                    Trials(
                        solutions={} if solution is None else _named(solution, "solution"),
                        attacks={} if attacks is None else _named(attacks, "attacks"),
                        full_reward=full,
                    )
                )
            )
        except NotPlain as error:
            found.append(StepInvalid(str(error)))
        except StepInvalid as fault:
            found.append(fault)
    return found


def check_trials(trials: Trials) -> Trials:
    """The trials, as plain data.

    Raises:
        StepInvalid, NotPlain: The message names the method and the answer.
    """
    full = trials.full_reward
    if full is not None and (isinstance(full, bool) or not isinstance(full, int | float) or not math.isfinite(full)):
        raise StepInvalid(f"full_reward is {repr_of(full)}; it must be a finite number, or None")
    return Trials(
        solutions=_checked(trials.solutions, "solution"),
        attacks=_checked(trials.attacks, "attacks"),
        full_reward=None if full is None else float(full),
    )


def _named(returned: Any, method: str) -> Mapping[str, Any]:
    if isinstance(returned, Mapping):
        return returned
    if method == ONLY:
        return {ONLY: returned}
    raise StepInvalid(f"{method} returned {repr_of(returned)}; it must be an object: responses by the attack's name")


def _checked(given: Mapping[str, Any], method: str) -> dict[str, list[ChatMessage]]:
    if len(given) > MAX_TRIALS:
        raise StepInvalid(f"{method} returned {len(given)} answers; at most {MAX_TRIALS} are taken")
    found = {}
    for name, responses in given.items():
        text = unicode_text(name, f"a name of {method}") if isinstance(name, str) else ""
        if not 0 < len(text) <= MAX_NAME:
            raise StepInvalid(f"{method} names an answer {repr_of(name)}; it must be a text of 1 to {MAX_NAME} letters")
        found[text] = _responses(responses, f"{method}[{text!r}]")
    return found


def _responses(given: Any, where: str) -> list[ChatMessage]:
    if isinstance(given, str):
        # One turn.
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes) or not 0 < len(given) <= MAX_TURNS:
        raise StepInvalid(f"{where} is {repr_of(given)}; it must be a list of responses, one for each turn")
    return [_message(one, f"{where}[{turn}]") for turn, one in enumerate(given)]


def _message(given: Any, where: str) -> ChatMessage:
    if isinstance(given, str):
        return {"role": "assistant", "content": unicode_text(given, where)}
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str):
        raise StepInvalid(f"{where} is {repr_of(given)}; it must be a text, or a message with a content")
    return {**plain(dict(given), where), "role": "assistant"}
