"""Queues for tests: Kueue itself where this machine has it, else a stand-in that admits and preempts as Kueue does.

KUBEROLL_TEST_KUEUE names Kueue's binary, and KUBEROLL_TEST_KUEUE_CONFIG the directory `config` of the sources it was
built from.
Kueue wants a certificate for its metrics, too, in /etc/kueue/metrics/certs (tls.crt, tls.key).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from tests.cluster.api import Api, ApiError, Object, is_true
from tests.cluster.control_plane import ApiServer, ServerProcess, free_port
from tests.cluster.kubelet import NODE
from tests.operator import published_crds

GPU: Final = "nvidia.com/gpu"
FLAVOR: Final = "gpus"
_GROUP: Final = "/apis/kueue.x-k8s.io/v1beta2"
_CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# What Kueue looks at of other projects is not there, and its own webhooks for them are never called.
_HOOKED: Final = frozenset({"kueue.x-k8s.io", "batch", "apps", ""})


@asynccontextmanager
async def queues(
    api: Api, server: ApiServer, directory: Path, namespace: str, *, gpus: int, configuration: Mapping[str, Any]
) -> AsyncIterator[None]:
    """A LocalQueue `team` of a namespace with so many GPUs, the priorities `low` and `high`, and who admits.

    Args:
        configuration: Fields of Kueue's own configuration; of no meaning to the stand-in.
    """
    binary = os.environ.get("KUBEROLL_TEST_KUEUE")
    async with contextlib.AsyncExitStack() as stack:
        if binary is None:
            for plural in ("workloads", "resourceflavors", "workloadpriorityclasses"):
                await _install(api, published_crds.crd(plural))
        else:
            config = Path(os.environ["KUBEROLL_TEST_KUEUE_CONFIG"])
            for path in sorted((config / "components" / "crd" / "bases").glob("*.yaml")):
                await _install(api, _one_version(YAML(typ="safe").load(path.read_text())))
            stack.push_async_callback(_remove_hooks, api)
            process = await _start(api, server, directory, Path(binary), config, configuration)
            stack.callback(process.stop)
        flavor = {"nodeLabels": {"kubernetes.io/hostname": NODE}}
        await _put(api, "resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": FLAVOR}, "spec": flavor})
        for name, value in (("low", 1), ("high", 1000)):
            await _put(
                api,
                "workloadpriorityclasses",
                {"kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value},
            )
        if binary is None:
            task = asyncio.create_task(StandIn(api, namespace, gpus).run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        else:
            await _make_queue(api, namespace, gpus)
            yield
            await _remove_queue(api, namespace)


class StandIn:
    """Admits what fits, in the order of priority and age; what is more important takes the place of what is less.

    An evicted Workload keeps its quota until its owner gives it back.
    """

    def __init__(self, api: Api, namespace: str, gpus: int) -> None:
        self._api, self._namespace, self._gpus = api, namespace, gpus

    async def run(self) -> None:
        """Works until it is cancelled."""
        async for _ in self._api.changes("Workload", self._namespace):
            # What somebody else has changed meanwhile is another change.
            with contextlib.suppress(ApiError):
                await self._look()

    async def _look(self) -> None:
        items = await self._api.list("Workload", self._namespace)
        alive = [item for item in items if not is_true(item, "Finished")]
        holding = [item for item in alive if (item.get("status") or {}).get("admission")]
        waiting = sorted((item for item in alive if item not in holding), key=_rank)
        free = self._gpus - sum(_gpus(item) for item in holding)
        for item in waiting:
            if _gpus(item) <= free:
                await self._admit(item)
                return
            for other in holding:
                if _rank(other)[0] > _rank(item)[0] and not is_true(other, "Evicted"):
                    await self._say(other, Evicted=("True", "Preempted"))
                    return
            await self._say(item, QuotaReserved=("False", "Pending"))

    async def _admit(self, item: Object) -> None:
        assignments = [
            {"name": part["name"], "count": part["count"], "flavors": {GPU: FLAVOR}} for part in item["spec"]["podSets"]
        ]
        said: dict[str, tuple[str, str]] = {kind: ("True", kind) for kind in ("QuotaReserved", "Admitted")}
        if is_true(item, "Evicted"):
            said["Evicted"] = ("False", "QuotaReserved")
        await self._say(item, {"clusterQueue": "c", "podSetAssignments": assignments}, **said)

    async def _say(self, item: Object, admission: Object | None = None, **said: tuple[str, str]) -> None:
        known = {one["type"]: one for one in (item.get("status") or {}).get("conditions") or ()}
        before = json.dumps(known)
        for kind, (status, why) in said.items():
            if known.get(kind, {}).get("status") != status:
                known[kind] = {
                    "type": kind,
                    "status": status,
                    "reason": why,
                    "message": f"{kind}: it is so",
                    "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
        if json.dumps(known) == before and admission is None:
            return
        changed = {"conditions": list(known.values()), **({"admission": admission} if admission else {})}
        metadata = item["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": changed}
        await self._api.patch("Workload", self._namespace, metadata["name"], body, subresource="status")


def _rank(item: Object) -> tuple[int, str, str]:
    return -int(item["spec"].get("priority", 0)), item["metadata"]["creationTimestamp"], item["metadata"]["name"]


def _gpus(item: Object) -> int:
    free = {part["name"]: part["count"] for part in (item.get("status") or {}).get("reclaimablePods") or ()}
    return sum(
        (part["count"] - free.get(part["name"], 0))
        * sum(
            int(one.get("resources", {}).get("limits", {}).get(GPU, 0))
            for one in part["template"]["spec"]["containers"]
        )
        for part in item["spec"]["podSets"]
    )


async def _install(api: Api, crd: Object) -> None:
    await api.apply({**crd, "status": None})
    await api.wait("CustomResourceDefinition", None, crd["metadata"]["name"], lambda item: is_true(item, "Established"))


def _one_version(crd: Object) -> Object:
    """Without those that only Kueue's webhook can convert."""
    spec = {key: value for key, value in crd["spec"].items() if key != "conversion"}
    spec["versions"] = [item for item in spec["versions"] if item["storage"]]
    return {**crd, "spec": spec}


async def _start(
    api: Api, server: ApiServer, directory: Path, binary: Path, config: Path, given: Mapping[str, Any]
) -> ServerProcess:
    port, health = free_port(), free_port()
    certificates = directory / "kueue-certificates"
    certificates.mkdir()
    shutil.copy(server.certificates.certificate, certificates / "tls.crt")
    shutil.copy(server.certificates.key, certificates / "tls.key")
    file = directory / "kueue.yaml"
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job", "pod", "deployment"]},
        **given,
    }
    file.write_text(json.dumps(configuration))
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    process = ServerProcess(
        [str(binary), f"--config={file}", "--zap-log-level=3"], directory / "kueue.log", environment
    )
    process.wait_until(lambda: _is_open(port))
    for kind, plural in (
        ("MutatingWebhookConfiguration", "mutatingwebhookconfigurations"),
        ("ValidatingWebhookConfiguration", "validatingwebhookconfigurations"),
    ):
        for item in YAML(typ="safe").load_all((config / "components" / "webhook" / "manifests.yaml").read_text()):
            if item["kind"] == kind:
                await api.request(
                    "POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", _hooks(item, port, server.authority)
                )
    return process


def _hooks(item: Object, port: int, authority: Path) -> Object:
    """Kueue's webhooks at an address in place of a Service."""
    bundle = base64.b64encode(authority.read_bytes()).decode()
    kept = [
        hook for hook in item["webhooks"] if {group for rule in hook["rules"] for group in rule["apiGroups"]} <= _HOOKED
    ]
    hooks = [
        {
            **hook,
            "clientConfig": {
                "url": f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}",
                "caBundle": bundle,
            },
        }
        for hook in kept
        if not {"statefulsets"} & {name for rule in hook["rules"] for name in rule["resources"]}
    ]
    return {**item, "metadata": {"name": "kueue"}, "webhooks": hooks}


async def _remove_hooks(api: Api) -> None:
    for plural in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        with contextlib.suppress(ApiError):
            await api.request("DELETE", f"/apis/admissionregistration.k8s.io/v1/{plural}/kueue")


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


async def _put(api: Api, plural: str, item: Object, namespace: str | None = None) -> None:
    path = "/".join(filter(None, (_GROUP, f"namespaces/{namespace}" if namespace else None, plural)))
    for _ in range(100):
        try:
            await api.request("POST", path, {"apiVersion": "kueue.x-k8s.io/v1beta2", **item})
        except ApiError as error:
            if error.status == 409:
                return
            # A CRD that is established is served a moment later; so are webhooks.
            if error.status < 500 and error.status != 404:
                raise
        else:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{path}: not served")


async def _make_queue(api: Api, namespace: str, gpus: int) -> None:
    quotas: list[Object] = [
        {"name": GPU, "nominalQuota": gpus},
        {"name": "cpu", "nominalQuota": 100},
        {"name": "memory", "nominalQuota": "1Ti"},
    ]
    groups = [
        {"coveredResources": [item["name"] for item in quotas], "flavors": [{"name": FLAVOR, "resources": quotas}]}
    ]
    spec = {
        "namespaceSelector": {},
        "resourceGroups": groups,
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    await _put(api, "clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": namespace}, "spec": spec})
    local = {"kind": "LocalQueue", "metadata": {"name": "team"}, "spec": {"clusterQueue": namespace}}
    await _put(api, "localqueues", local, namespace)


async def _remove_queue(api: Api, namespace: str) -> None:
    for path in (f"{_GROUP}/namespaces/{namespace}/localqueues/team", f"{_GROUP}/clusterqueues/{namespace}"):
        with contextlib.suppress(ApiError):
            await api.request("DELETE", path)
