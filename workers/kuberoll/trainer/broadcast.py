"""The transport `broadcast`: weights go from the trainer's memory to all replicas at once, without files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kuberoll.trainer.model_weights import model_tensors
from kuberoll.trainer.offering import WeightsServer, own_address
from kuberoll.trainer.senders import SENDERS, Rendezvous
from kuberoll.trainer.snapshots import Snapshot, take_snapshot
from kuberoll.trainer.transports import Transport
from kuberoll_workers.data.weights.manifest import MODEL_FILE, WeightsManifest
from kuberoll_workers.data.weights.tensors import write_file

# The one that is served, and the one that is being published.
_KEPT = 2


class Broadcast(Transport):
    """From memory to memory, by vLLM's weight transfer: for replicas with `engineArgs.weight_transfer_config`.

    The trainer's process keeps copies of the two newest versions in its memory, and sends from them: it may go on
    training at once, and a replica that starts later has the newest version from there. Whole files are written only
    where a replica cannot receive.
    """

    def __init__(
        self,
        backend: str = "gloo",
        *,
        address: str | None = None,
        port: int = 0,
        files: bool = False,
        gather_seconds: float = 5.0,
        seconds: float = 300.0,
        chunk_bytes: int = 64 << 20,
    ) -> None:
        """
        Args:
            backend: `gloo`: over TCP. `nccl`: from this process's GPU, with vLLM in the trainer's environment, too.
                Replicas have the same `weight_transfer_config.backend`.
            address: Name or address of this machine for the replicas; None: the one from which the policy is reached.
            port: Where replicas connect; 0: any. Others are chosen freely for each group.
            files: Write each version's files, too, after the replicas have it: for replicas that start while the
                trainer is away.
            gather_seconds: For which the replicas that are known of are waited for, so that all receive at once.
            seconds: For which a transfer may take; then it has failed.
            chunk_bytes: Sent at once.
        """
        if backend not in SENDERS:
            raise ValueError(f"backend: found {backend!r}; use one of {', '.join(SENDERS)}")
        self._backend = backend
        self._address = address
        self._port = port
        self._files = files
        self._gather_seconds = gather_seconds
        self._seconds = seconds
        self._chunk_bytes = chunk_bytes
        self._policy_url: str | None = None
        self._server: WeightsServer | None = None
        self._host = ""
        # Versions that are offered, the newest last.
        self._held: list[int] = []
        self._written: Snapshot | None = None
        # Memory that can be used again.
        self._spare: Snapshot | None = None
        self._anchored = 0

    @property
    def leaves_files(self) -> bool:
        return self._files

    def reach(self, url: str | None) -> None:
        self._policy_url = url

    def write(self, weights: Any, *, version: int, dtype: str | None, target: Path) -> WeightsManifest:  # noqa: ARG002
        tensors = model_tensors(weights, dtype=dtype)
        while len(self._held) >= _KEPT:
            self._drop(self._held.pop(0), "a newer version is published")
        self._written = take_snapshot(tensors, version, into=self._spare)
        self._spare = None
        return WeightsManifest(version=version, files={})

    def direct_bytes(self) -> int:
        return 0 if self._written is None else self._written.bytes

    def address(self, version: int, uri: str, *, replicas: int) -> str:
        server = self._serving()
        if self._written is not None and self._written.version == version and version not in self._held:
            server.offer(self._written, replicas=replicas)
            self._held.append(version)
        # What a trainer before this one sent is with the replicas that serve it, or in its files.
        return server.uri(version, host=self._host, files=uri) if version in self._held else uri

    def write_anchor(self, version: int, target: Path) -> str | None:
        server = self._server
        snapshot = None if server is None else server.snapshot(version)
        if server is None or snapshot is None or version == self._anchored:
            return None
        if not self._files and not server.is_missed(version):
            # All of them came: they will come again.
            return None
        write_file(target / MODEL_FILE, snapshot.tensors())
        self._anchored = version
        return MODEL_FILE

    def forget(self) -> None:
        written, self._written = self._written, None
        if written is None:
            return
        if written.version in self._held:
            self._held.remove(written.version)
            self._drop(written.version, f"version {written.version} was taken back")
        else:
            self._spare = written

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._held = []

    def _drop(self, version: int, why: str) -> None:
        if self._server is not None:
            self._spare = self._server.withdraw(version, why) or self._spare

    def _serving(self) -> WeightsServer:
        if self._server is None:
            self._host = self._address or own_address(self._policy_url)
            self._server = WeightsServer(
                address=self._host,
                port=self._port,
                backend=self._backend,
                meeting=Rendezvous(
                    host=self._host, seconds=self._seconds, chunk_bytes=self._chunk_bytes, device=_current_gpu()
                ),
                gather_seconds=self._gather_seconds,
                seconds=self._seconds,
            )
        return self._server


def _current_gpu() -> int | None:
    """Index of the GPU that this thread uses; None: there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return None
    return int(torch.accelerator.current_device_index())
