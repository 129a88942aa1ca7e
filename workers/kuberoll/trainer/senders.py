"""Ways of a snapshot to the workers of several replicas at once, by the backend of their engines.

A sender and the replicas are one group of processes, which is made anew when the replicas change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from kuberoll.trainer.snapshots import Snapshot
from kuberoll_workers.data.weights.gloo import GlooGroup
from kuberoll_workers.data.weights.offers import HEADER_BYTES as _HEADER_BYTES
from kuberoll_workers.data.weights.offers import Answer, Call, Method, decode_message, encode_message, message_length


class TransferFailed(Exception):
    """Weights did not reach all replicas; the message says why."""


class DoNotFit(TransferFailed):
    """Weights do not fit the model of a replica."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where a group meets.

    Attributes:
        host: Address of this machine that the replicas reach.
        seconds: For which its members wait for each other.
        chunk_bytes: Bytes of one transfer.
        device: Index of the trainer's GPU; None: it has none.
    """

    host: str
    seconds: float
    chunk_bytes: int
    device: int | None = None


class ReplicaLine:
    """The connection to a replica that wants weights."""

    def __init__(self, connection: socket.socket, *, workers: int, group: str | None) -> None:
        self._connection = connection
        self.workers: Final = workers
        self.group: Final = group

    def call(self, method: Method, arguments: dict[str, Any] | None = None) -> None:
        """Ask for something.

        Raises:
            OSError: The replica is gone.
        """
        self._connection.sendall(encode_message(Call(method=method, arguments=arguments or {})))

    def answer(self) -> str | None:
        """Wait for the answer; return why it failed, or None.

        Raises:
            OSError, EOFError, OfferRefused: The replica is gone, or says something else.
        """
        return decode_message(receive_message(self._connection), Answer).error

    def refuse(self, why: str, *, files: bool = True) -> None:
        """Say why it will have no weights, and end.

        Args:
            files: Whether it may have them from files.
        """
        with contextlib.suppress(OSError):
            self.call("refuse", {"why": why, "files": files})
        self.close()

    def close(self) -> None:
        """Close the connection, also while another thread uses it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def receive_message(connection: socket.socket) -> bytes:
    """Receive one message of the protocol.

    Raises:
        OSError, EOFError, OfferRefused: There is none.
    """
    return _exactly(connection, message_length(_exactly(connection, _HEADER_BYTES)))


class Replicas:
    """The four calls of vLLM's `VLLMWeightSyncClient`, to several replicas at once."""

    def __init__(self, lines: list[ReplicaLine], *, group: str, version: int) -> None:
        """`group` is the name of the group that they are to be members of."""
        self._lines = lines
        self._group = group
        self._version = str(version)

    @property
    def workers(self) -> int:
        """Number of all their workers."""
        return sum(line.workers for line in self._lines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all workers join the group: each replica's have the ranks after those of the one before."""
        infos, offset = [], int(init_info.get("rank_offset", 1))
        for line in self._lines:
            infos.append({"init_info": {**init_info, "rank_offset": offset}, "group": self._group})
            offset += line.workers
        self._ask("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        """Have all begin."""
        self._ask("start_weight_update", [{"group": self._group}] * len(self._lines))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have all receive."""
        self._ask("update_weights", [update_info] * len(self._lines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have all generate with what they have received."""
        version = self._version if weight_version is None else weight_version
        self._ask("finish_weight_update", [{"version": version}] * len(self._lines))

    def _ask(self, method: Method, arguments: list[dict[str, Any]]) -> None:
        """
        Raises:
            TransferFailed: One is gone, or could not.
        """
        errors = []
        try:
            for line, argument in zip(self._lines, arguments, strict=True):
                line.call(method, argument)
            errors = [error for line in self._lines if (error := line.answer()) is not None]
        except (OSError, EOFError, ValueError) as error:
            raise TransferFailed(f"a replica was lost at {method}: {type(error).__name__}: {error}") from error
        if errors:
            raise TransferFailed("; ".join(sorted(set(errors))))


def check(lines: list[ReplicaLine], snapshot: Snapshot) -> list[ReplicaLine]:
    """Ask replicas whether the weights fit; return those that are still there.

    Raises:
        DoNotFit: They do not fit one.
        TransferFailed: None is there.
    """
    here = []
    for line in lines:
        with contextlib.suppress(OSError):
            line.call("check", msgspec.to_builtins(snapshot.described))
            here.append(line)
    fitting, errors = [], []
    for line in here:
        with contextlib.suppress(OSError, EOFError, ValueError):
            if (error := line.answer()) is None:
                fitting.append(line)
            else:
                errors.append(error)
    if errors:
        raise DoNotFit(f"they do not fit the model of a replica: {errors[0]}")
    if not fitting:
        raise TransferFailed("the replicas that came for them are gone")
    return fitting


class Sender(Protocol):
    """A group that can send; it is used by one thread at a time."""

    def open(self, replicas: Replicas, snapshot: Snapshot) -> None:
        """Form the group with the replicas' workers.

        Raises:
            Exception: Not all of them came.
        """
        ...

    def send(self, replicas: Replicas, snapshot: Snapshot) -> None:
        """Have all replicas generate with a snapshot.

        Raises:
            Exception: Not all of them do.
        """
        ...

    def close(self) -> None:
        """Leave the group; what other threads do in it fails, if that is possible at all."""
        ...


class GlooSender:
    """Over TCP, from the trainer's memory to that of the workers: without GPUs, or between them and other machines."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._group: GlooGroup | None = None

    def open(self, replicas: Replicas, snapshot: Snapshot) -> None:  # noqa: ARG002 - as the protocol has it
        meeting = self._meeting
        listener = socket.create_server(
            (meeting.host, 0), family=socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        )
        port, size = int(listener.getsockname()[1]), 1 + replicas.workers
        replicas.init_weight_transfer_engine(
            {
                "master_address": meeting.host,
                "master_port": port,
                "rank_offset": 1,
                "world_size": size,
                "seconds": meeting.seconds,
                "chunk_bytes": meeting.chunk_bytes,
            }
        )
        self._group = GlooGroup(
            host=meeting.host, port=port, rank=0, size=size, seconds=meeting.seconds, listener=listener
        )

    def send(self, replicas: Replicas, snapshot: Snapshot) -> None:
        import torch

        assert self._group is not None
        replicas.start_weight_update()
        # They answer when they have begun to receive.
        replicas.update_weights(msgspec.to_builtins(snapshot.described))
        self._group.broadcast(torch.from_numpy(snapshot.buffer), self._meeting.chunk_bytes)
        replicas.finish_weight_update()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


class VLLMSender:
    """By vLLM's own sender for the backend `nccl`, which the trainer's environment must have, from a GPU to GPUs.

    It has not been run on GPUs yet.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._engine: Any = None
        self._source: Any = None

    def open(self, replicas: Replicas, snapshot: Snapshot) -> None:
        import torch
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if self._meeting.device is not None:
            # Each thread has a current device of its own.
            torch.accelerator.set_device_index(self._meeting.device)
        self._source = _source(snapshot)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                rank=0,
                master_address=self._meeting.host,
                master_port=_free_port(self._meeting.host),
                world_size=1 + replicas.workers,
                packed_buffer_size_bytes=self._meeting.chunk_bytes,
            ),
            client=replicas,
            source=self._source,
        )

    def send(self, replicas: Replicas, snapshot: Snapshot) -> None:
        import torch

        if self._meeting.device is not None:
            torch.accelerator.set_device_index(self._meeting.device)
        self._source.snapshot = snapshot
        self._engine.client = replicas
        self._engine.send_weights()

    def close(self) -> None:
        if self._engine is not None:
            # It aborts the communicator, and with it what waits in it.
            self._engine.shutdown()


def _source(snapshot: Snapshot) -> Any:
    """A snapshot as what vLLM sends, on this process's GPU."""
    import torch
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM has no types
        def __init__(self) -> None:
            self.snapshot = snapshot

        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.snapshot.torch_tensors()
            ]

        def __iter__(self) -> Any:
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
            for name, tensor in self.snapshot.torch_tensors():
                yield name, tensor.to(device)

    return Source()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError("the connection was closed")
        received += part
    return bytes(received)


SENDERS: Final[Mapping[str, Callable[[Rendezvous], Sender]]] = {"gloo": GlooSender, "nccl": VLLMSender}
