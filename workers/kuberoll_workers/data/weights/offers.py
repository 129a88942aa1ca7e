"""Weights that a trainer offers directly, without files: where, and what it and a replica say to each other.

A replica connects to the trainer and says what it wants (`Hello`). From then on the trainer calls and the replica
answers, one call at a time. The calls are those of vLLM's weight transfer, and two more: `check` asks whether tensors
fit the model, and `refuse` says why there will be none. Whoever gives up closes the connection.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

Method = Literal[
    "check", "refuse", "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
]

SCHEME: Final = "trainer"
HEADER_BYTES: Final = 4
"""Bytes of the length before each message."""

MAX_MESSAGE_BYTES: Final = 256 << 20
# So that tensors of any type can be viewed in place.
_ALIGNMENT = 64


Message = TypeVar("Message", bound=msgspec.Struct)


class OfferRefused(ValueError):
    """A URI that begins as an offer's and is none, or a message that is not of the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A version of weights that a trainer has in its memory.

    Attributes:
        key: Who knows it may have them.
        files: Where the version is, or will be, as files; None: nowhere that replicas can read.
    """

    host: str
    port: int
    version: str
    key: str
    files: str | None = None

    @property
    def uri(self) -> str:
        """Its URI, such as trainer://10.0.0.5:29400/7?key=…&files=…."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = {"key": self.key} | ({} if self.files is None else {"files": self.files})
        return f"{SCHEME}://{host}:{self.port}/{self.version}?{urllib.parse.urlencode(query)}"


def offer_of(uri: str) -> Offer | None:
    """The offer that a URI names; None: it names files.

    Raises:
        OfferRefused: It is malformed.
    """
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme != SCHEME:
        return None
    query = urllib.parse.parse_qs(parts.query)
    try:
        return Offer(
            host=parts.hostname or "",
            port=int(parts.port or 0),
            version=parts.path.removeprefix("/"),
            key=query["key"][0],
            files=query.get("files", [None])[0],
        )
    except (KeyError, ValueError) as error:
        raise OfferRefused(f"{uri.partition('?')[0]} is not a trainer's offer of weights: {error}") from error


class Hello(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica wants.

    Attributes:
        backend: Its engine's `weight_transfer_config.backend`.
        workers: Number of its engine's workers, which all receive.
        group: Name of the group that it is still a member of; None: of none.
    """

    key: str
    version: str
    backend: str
    workers: int
    group: str | None = None


class Call(msgspec.Struct, kw_only=True, frozen=True):
    """What the trainer wants of a replica."""

    method: Method
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to a call.

    Attributes:
        error: Why it failed; None: it succeeded.
    """

    error: str | None = None


class Tensors(msgspec.Struct, kw_only=True, frozen=True):
    """Description of all tensors, as vLLM's `update_weights` takes it.

    Attributes:
        dtype_names: As PyTorch calls them, such as bfloat16.
    """

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of tensors that follow each other in one buffer, and its length; all in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def encode_message(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def message_length(header: bytes) -> int:
    """The length of the message after a header.

    Raises:
        OfferRefused: It is too long.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise OfferRefused(f"a message of {length} bytes: the other side does not speak this protocol")
    return length


def decode_message(data: bytes, kind: type[Message]) -> Message:
    """Read a message.

    Raises:
        OfferRefused: It is of another kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise OfferRefused(f"the other side does not speak this protocol: {error}") from error
