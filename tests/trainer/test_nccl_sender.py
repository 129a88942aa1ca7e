"""What vLLM's own sender for GPUs is given, and what replicas are told: all but NCCL itself, which needs GPUs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kuberoll.trainer.model_weights import model_tensors
from kuberoll.trainer.senders import Rendezvous, ReplicaLine, Replicas, VLLMSender, receive_message
from kuberoll.trainer.snapshots import take_snapshot
from kuberoll_workers.data.weights.offers import Answer, Call, decode_message, encode_message

pytestmark = pytest.mark.engine


@contextmanager
def replica(workers: int) -> Iterator[tuple[ReplicaLine, list[Call]]]:
    """A replica that does all that it is told, and the calls that it has had."""
    calls: list[Call] = []
    ours, theirs = socket.socketpair()

    def work() -> None:
        while True:
            try:
                calls.append(decode_message(receive_message(theirs), Call))
            except EOFError:
                return
            theirs.sendall(encode_message(Answer()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ReplicaLine(ours, workers=workers, group=None), calls
    finally:
        ours.close()
        thread.join()
        theirs.close()


class Communicator:
    """Where NCCL would be."""

    closed = False

    def destroy(self) -> None:
        self.closed = True


def test_vllm_sends_to_all_workers_what_replicas_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient, nccl_engine
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    opened: list[Any] = []
    sent: list[tuple[str, torch.Tensor]] = []
    communicator = Communicator()

    def open_endpoint(info: Any) -> Communicator:
        opened.append(info)
        return communicator

    def broadcast(self: Any, source: Any, meta: Any) -> None:
        assert self.model_update_group is communicator
        # It compares names, types and shapes with what the replicas were told.
        sent.extend(self._checked_iter(source, meta))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_endpoint)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    versions = [{"a": torch.full((3, 5), float(number)).bfloat16(), "b": torch.arange(7) + number} for number in (1, 2)]
    snapshots = [
        take_snapshot(model_tensors(state, dtype=None), number) for number, state in enumerate(versions, start=1)
    ]
    sender = VLLMSender(Rendezvous(host="127.0.0.1", seconds=5, chunk_bytes=1 << 20))
    with replica(2) as (first, calls), replica(3) as (second, other_calls):
        lines = [first, second]
        replicas = Replicas(lines, group="g", version=1)
        assert isinstance(replicas, VLLMWeightSyncClient)
        sender.open(replicas, snapshots[0])
        for snapshot in snapshots:
            sender.send(Replicas(lines, group="g", version=snapshot.version), snapshot)
        sender.close()
    assert communicator.closed
    steps = ["start_weight_update", "update_weights", "finish_weight_update"]
    for offset, found in ((1, calls), (3, other_calls)):
        assert [call.method for call in found] == ["init_weight_transfer_engine", *steps, *steps]
        told = NCCLWeightTransferInitInfo(**found[0].arguments["init_info"])
        assert (told.rank_offset, told.world_size, opened[0].world_size) == (offset, 6, 6)
        assert (told.master_port, told.packed) == (opened[0].master_port, opened[0].packed)
        for version, update in enumerate((found[2], found[5]), start=1):
            described = nccl_engine.NCCLWeightTransferUpdateInfo(**update.arguments)
            assert described.names == ["a", "b"]
            assert described.dtype_names == ["bfloat16", "int64"]
            assert described.shapes == [[3, 5], [7]]
            assert found[3 * version].arguments == {"version": str(version)}
    for (name, tensor), state in zip(sent, [versions[0], versions[0], versions[1], versions[1]], strict=True):
        assert torch.equal(tensor, state[name])
