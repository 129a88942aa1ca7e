"""The contract, by the pods of a real cluster, and what only a real cluster says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.handle import Sandbox
from tests.sandboxes.cluster.real import RealCluster
from tests.sandboxes.contract import Machines
from tests.sandboxes.layouts import busybox_layout
from tests.sandboxes.pod_contract import PodContract

# Images that no container can be made of: their configuration and files, and what is said.
_IMPOSSIBLE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no-such-user": ({"User": "nosuch"}, "container user"),
    "file-as-workdir": ({"WorkingDir": "/etc/passwd"}, "not a directory"),
    "relative-workdir": ({"WorkingDir": "work"}, "absolute path"),
    "variable-without-name": ({"Env": ["=x"]}, "environment variable name"),
    "file-in-the-way": ({"files": {".kuberoll": "file"}}, "not a directory"),
}


class TestRealPods(PodContract):
    """The contract of pods."""

    ways_to_end = ("delete", "force", "evict")
    events = frozenset(
        {("delete", "Deleted"), ("delete", "Error"), ("force", "Deleted"), ("evict", "EvictionByEvictionAPI")}
    )

    @pytest.mark.parametrize("kind", _IMPOSSIBLE)
    async def test_an_image_that_never_runs_is_no_loss(
        self, machines: Machines, cluster: RealCluster, tmp_path: Path, kind: str
    ) -> None:
        config, words = _IMPOSSIBLE[kind]
        image = await asyncio.to_thread(
            lambda: cluster.images.push(kind, busybox_layout(tmp_path / "layout", **config), tmp_path)
        )
        with pytest.raises(SandboxUnavailable, match=words) as raised:
            await machines.driver.create(machines.name(), machines.spec(image, start_seconds=60))
        assert "did not start within" not in str(raised.value)

    async def test_nobody_answers_for_names(self, sandbox: Sandbox) -> None:
        said = (await sandbox.exec(["cat", "/etc/resolv.conf"])).text
        assert said.split() == ["nameserver", "127.0.0.1"]
        for name in ("kubernetes.default.svc.cluster.local", "example.com"):
            assert not (await sandbox.exec(["nslookup", name], timeout=30)).succeeded

    async def test_nobody_makes_users_of_its_own(self, sandbox: Sandbox) -> None:
        assert not (await sandbox.exec(["unshare", "-U", "true"], user="root")).succeeded

    async def test_a_quota_of_limits_admits_a_sandbox_with_limits(
        self, machines: Machines, cluster: RealCluster
    ) -> None:
        async with _quota(cluster, {"limits.cpu": "1", "limits.memory": "1Gi"}):
            async with machines.one(cpus=0.5, memory=64 << 20) as sandbox:
                assert (await sandbox.exec(["echo", "here"])).text == "here\n"
            with pytest.raises(SandboxUnavailable, match=r"must specify limits\.cpu"):
                await machines.driver.create(machines.name(), machines.spec(memory=64 << 20))

    async def test_who_waits_for_quota_says_so_however_short_its_time_is(
        self, machines: Machines, cluster: RealCluster
    ) -> None:
        async with _quota(cluster, {"pods": "0"}):
            with pytest.raises(SandboxUnavailable, match=r"did not start within 8 s: it waits for quota: .*exceeded"):
                await machines.driver.create(machines.name(), machines.spec(start_seconds=8))


@asynccontextmanager
async def _quota(cluster: RealCluster, hard: dict[str, str]) -> AsyncIterator[None]:
    """Have a quota, once it is counted."""
    item = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}}
    kubectl = cluster.kubectl
    await asyncio.to_thread(kubectl.apply, item)
    try:
        first = next(iter(hard)).replace(".", "\\.")
        counted = f"--for=jsonpath={{.status.used.{first}}}"
        await asyncio.to_thread(kubectl.run, "wait", "resourcequota/quota", counted, "--timeout=120s")
        yield
    finally:
        await asyncio.to_thread(kubectl.run, "delete", "resourcequota", "quota")
