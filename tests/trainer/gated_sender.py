"""A sender that stops in the middle of a version, and a trainer's process with one."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from kuberoll.trainer import Broadcast, PolicyEndpoint, Publisher, senders
from kuberoll.trainer.senders import GlooSender, Rendezvous, Replicas
from kuberoll.trainer.snapshots import Snapshot


class Gate:
    """Stops senders in the middle of a version, once.

    Attributes:
        reached: Set when half of the weights are with the replicas.
        opened: Set it to have the other half sent.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.reached, self.opened = threading.Event(), threading.Event()

    def sender(self, meeting: Rendezvous) -> GlooSender:
        """For `senders.SENDERS`."""
        return _GatedSender(meeting, self)


class _GatedSender(GlooSender):
    def __init__(self, meeting: Rendezvous, gate: Gate) -> None:
        super().__init__(meeting)
        self._gate = gate

    def send(self, replicas: Replicas, snapshot: Snapshot) -> None:
        gate = self._gate
        assert self._group is not None
        chunk = self._meeting.chunk_bytes
        half = len(snapshot.buffer) // 2 // chunk * chunk
        replicas.start_weight_update()
        # As vLLM's sender does for NCCL: replicas that receive in place answer when they have everything.
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(replicas.update_weights, msgspec.to_builtins(snapshot.described))
            self._group.broadcast(torch.from_numpy(snapshot.buffer[:half]), chunk)
            if snapshot.version == gate.version and not gate.opened.is_set():
                gate.reached.set()
                assert gate.opened.wait(240)
            self._group.broadcast(torch.from_numpy(snapshot.buffer[half:]), chunk)
            updating.result()
        replicas.finish_weight_update()


def main(url: str, token: str, location: str, model: str, version: str) -> None:
    """Publish a model's weights, and say `half` when half of them are sent; the other half never is."""
    from transformers import LlamaForCausalLM

    gate = Gate(int(version))
    made: dict[str, Any] = senders.SENDERS  # type: ignore[assignment]
    made["gloo"] = gate.sender
    threading.Thread(target=_say_half, args=(gate,), daemon=True).start()
    weights = LlamaForCausalLM.from_pretrained(model)
    with Publisher(
        endpoint=PolicyEndpoint(url, token), location=Path(location), transport=Broadcast(chunk_bytes=1 << 16)
    ) as publisher:
        publisher.publish(weights, version=int(version))


def _say_half(gate: Gate) -> None:
    gate.reached.wait()
    sys.stdout.write("half\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
