"""kube-router as what enforces NetworkPolicies between the tests' containers: its firewall alone, on nftables."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.control_plane import ApiServer, ServerProcess, free_port
from tests.cluster.kubelet import NODE

BINARY_VARIABLE = "KUBEROLL_TEST_KUBE_ROUTER"
"""Environment variable: kube-router's binary, of version 2.9 or later."""

_TABLE = ("table", "ip", "kube-router-filter-ipv4")
# Frames between two pods stay on the bridge; the firewall sees them when this says so.
_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


class Unusable(Exception):
    """This machine cannot enforce NetworkPolicies; the message says why."""


def binary() -> str:
    """Where kube-router is.

    Raises:
        Unusable: Nobody says, or the kernel has nothing that it needs.
    """
    if not (found := os.environ.get(BINARY_VARIABLE)):
        raise Unusable(f"{BINARY_VARIABLE} names no binary of kube-router")
    if not _BRIDGED.exists():
        raise Unusable(f"no {_BRIDGED}: the kernel has no bridge netfilter")
    if shutil.which("nft") is None or not _nft("list", "tables"):
        raise Unusable("nft cannot list tables: no nftables, in the kernel or on the path")
    if _nft("list", *_TABLE):
        raise Unusable(f"this machine has the {' '.join(_TABLE)} of another kube-router")
    return found


def _nft(*arguments: str) -> bool:
    return not subprocess.run(["nft", *arguments], capture_output=True, check=False).returncode


@contextlib.contextmanager
def enforced(server: ApiServer) -> Iterator[ServerProcess]:
    """The NetworkPolicies of a server are enforced until the block is left, once kube-router has seen them.

    Raises:
        Unusable: It cannot run here.
    """
    found = binary()
    bridged = _BRIDGED.read_text()
    _BRIDGED.write_text("1\n")
    router: ServerProcess | None = None
    try:
        router = ServerProcess(
            [
                found,
                "--use-nftables-for-netpol",
                "--enable-ipv6=false",
                f"--kubeconfig={server.kubeconfig}",
                f"--hostname-override={NODE}",
                "--run-firewall=true",
                "--run-router=false",
                "--run-service-proxy=false",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--health-addr=127.0.0.1",
                f"--health-port={free_port()}",
            ],
            server.directory / "kube-router.log",
        )
        yield router
    finally:
        if router is not None:
            router.stop()
        _nft("delete", *_TABLE)
        _BRIDGED.write_text(bridged)
