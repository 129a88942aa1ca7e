"""States of ended rollouts of verifiers, kept in the metadata of their episodes until their prompt group is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kuberoll_workers.adapters.lossless import decode, encode

# Made anew, or of no use to a reward function.
_OMITTED = frozenset({"client", "completion", "input", "oai_tools", "trajectory", "usage_tracker"})
_PLAIN = (str, int, float, bool, type(None))


class LostEntry(RuntimeError):
    """A reward function asks for an entry of a state that could not be kept."""


def kept_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout's state has at its end, as JSON.

    Entries of other types than JSON's and tuples, such as clients and arrays, are not kept, but named in `lost`.
    The messages of the steps are kept once, with the whole conversation.
    """
    conversation = [*state["prompt"], *state["completion"]]
    entries = {name: value for name, value in state.items() if name not in _OMITTED}
    row = {name: value for name, value in state["input"].items() if name != "prompt"}
    steps: Any = [_kept_step(step, conversation) for step in state["trajectory"]]
    return {
        "prompt": len(state["prompt"]),
        "conversation": conversation,
        "row": encode({name: value for name, value in row.items() if _is_plain(value)}),
        "entries": encode({name: value for name, value in entries.items() if _is_plain(value)}),
        "steps": encode(steps) if _is_plain(steps) and None not in steps else None,
        "lost": sorted(name for name, value in {**row, **entries}.items() if not _is_plain(value)),
    }


def _kept_step(step: Mapping[str, Any], conversation: Sequence[Any]) -> dict[str, Any] | None:
    """A step without its messages; None if these are not a part of the conversation."""
    start, end = len(step["prompt"]), len(step["prompt"]) + len(step["completion"])
    if [*step["prompt"], *step["completion"]] != conversation[:end]:
        return None
    own = {name: value for name, value in step.items() if name not in ("prompt", "completion", "response", "tokens")}
    return {**own, "start": start, "end": end}


def restored_entries(kept: Mapping[str, Any], response: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """Entries of the state that `kept_state` was given, without those that are lost.

    Args:
        response: Makes an assistant's message the response of a client.
    """
    conversation, prompt = kept["conversation"], kept["prompt"]
    entries: dict[str, Any] = {
        **decode(kept["entries"]),
        "input": {**decode(kept["row"]), "prompt": conversation[:prompt]},
        "completion": conversation[prompt:],
    }
    if kept["steps"] is not None:
        entries["trajectory"] = [_step(step, conversation, response) for step in decode(kept["steps"])]
    return entries


def _step(step: Mapping[str, Any], conversation: Sequence[Any], response: Callable[[Any], Any]) -> dict[str, Any]:
    own = {name: value for name, value in step.items() if name not in ("start", "end")}
    said = conversation[step["start"] : step["end"]]
    return {
        **own,
        "prompt": conversation[: step["start"]],
        "completion": said,
        "response": response(said[0]),
        "tokens": None,
    }


def lost_entries(kept: Mapping[str, Any]) -> list[str]:
    """Names of the entries that are not in `restored_entries`."""
    return [*kept["lost"], *(["trajectory"] if kept["steps"] is None else [])]


def state_class(base: type[Any]) -> Callable[[Mapping[str, Any], Iterable[str]], Any]:
    """A subclass of verifiers' State which says that an entry is lost, where the base would say that there is none."""

    class KeptState(base):  # type: ignore[misc]
        """The state of an ended rollout."""

        def __init__(self, entries: Mapping[str, Any], lost: Iterable[str]) -> None:
            super().__init__(entries)
            self._lost = frozenset(lost)

        def _check(self, name: Any) -> None:
            if name in self._lost and not dict.__contains__(self, name):
                raise LostEntry(
                    f"state[{name!r}] of an ended rollout: it was not kept for the scoring of its group, because it is "
                    "not of JSON's types; keep what the reward functions need as texts, numbers, lists or objects"
                )

        def __getitem__(self, name: Any) -> Any:
            self._check(name)
            return super().__getitem__(name)

        def __contains__(self, name: Any) -> bool:
            self._check(name)
            return bool(super().__contains__(name))

    return KeptState


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return kind in _PLAIN
