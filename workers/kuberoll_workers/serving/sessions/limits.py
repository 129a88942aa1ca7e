"""What a session decides about the calls in it: their number, their length, their seeds and their sampling."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kuberoll_api.model.sampling_fields import CORE
from kuberoll_api.model.types import MAX_SEED
from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.policy.interface import SamplingParameters

if TYPE_CHECKING:
    from vllm import SamplingParams

# Fields by which a request says how many tokens it takes, in the order of preference; the first is the one to set.
_LENGTHS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
_RELEASED: Final = 16


class CallRefused(ValueError):
    """The session takes no such call."""


class CallLimits:
    """Limits and defaults of one session's calls.

    Attributes:
        refused: Number of calls that were refused.
        taken: Number of calls that count: those in flight, and those whose answer the caller got.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self.taken = self.refused = self._released = 0
        # Of all calls, so that no two get one seed.
        self._numbers = itertools.count()

    def admit(self, params: SamplingParams, prompt: int) -> None:
        """Admit a call, and set its length and its seed; see `RecordedSession.admit`.

        Raises:
            CallRefused: It is one call, or token, too many.
        """
        settings = self._settings
        if settings.max_calls is not None and self.taken >= settings.max_calls:
            self.refused += 1
            raise CallRefused(f"this session has had its {settings.max_calls} calls (spec.rollout.maxTurns)")
        if settings.max_sequence_length is not None:
            room = settings.max_sequence_length - prompt
            if room <= 0:
                self.refused += 1
                raise CallRefused(
                    f"the prompt has {prompt} tokens, and the maximum context length of this session, with the "
                    f"response, is {settings.max_sequence_length} (spec.rollout.maxSequenceLength)"
                )
            params.max_tokens = min(params.max_tokens or room, room)
        number = next(self._numbers)
        if settings.seed is not None and params.seed is None:
            params.seed = call_seed(settings.seed, number)
        self.taken += 1

    def release(self, calls: int) -> None:
        """Give back calls whose answer the caller did not get: a repeated one would count twice.

        One who leaves again and again, having read all but the end, gets no more back than a session may have.
        """
        most = max(_RELEASED, self._settings.max_calls or 0)
        calls = min(calls, most - self._released)
        self._released += calls
        self.taken -= calls

    def complete(self, path: str, body: dict[str, Any]) -> bool:
        """Set the session's sampling where a body leaves it open; see `RecordedSession.complete`."""
        if self._settings.sampling is None or path not in _LENGTHS:
            return False
        added = {
            name: value for name, value in _fields(path, self._settings.sampling).items() if body.get(name) is None
        }
        if any(body.get(name) is not None for name in _LENGTHS[path]):
            added.pop(_LENGTHS[path][0], None)
        body |= added
        return bool(added)


def call_seed(seed: int, number: int) -> int:
    """The seed of a session's call, which is counted from 0."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED


def _fields(path: str, sampling: SamplingParameters) -> dict[str, Any]:
    """Sampling as the fields of a request."""
    given: dict[str, Any] = msgspec.to_builtins(sampling)
    given.pop("seed", None)
    length = given.pop("max_tokens")
    # Those that Responses and Messages have, too. Also their usual values: the model's own configuration may have
    # others.
    fields = {name: getattr(sampling, name) for name in CORE}
    if path in ("/v1/chat/completions", "/v1/completions"):
        structured = given.pop("structured_outputs", None)
        fields |= {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        if structured is not None:
            fields["structured_outputs"] = structured
        if sampling.stop:
            # As in the loop: a stop string is part of the response.
            fields["include_stop_str_in_output"] = True
    elif path == "/v1/messages" and sampling.stop:
        fields["stop_sequences"] = list(sampling.stop)
    return {**fields, _LENGTHS[path][0]: length}
