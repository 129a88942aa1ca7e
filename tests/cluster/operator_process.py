"""The operator as a process, with the rights that it has in a cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

from tests.charts.rendering import rendered
from tests.cluster.api import Api, Object, is_true
from tests.cluster.control_plane import ServerProcess, free_port, kubeconfig

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "rolloutjobs.kuberoll.io.yaml"
SYSTEM_NAMESPACE = "kuberoll-system"
SERVICE_ACCOUNT = "kuberoll-operator"
RIGHTS = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})

LEASE_SECONDS = 3
"""Seconds after which another may take a killed operator's place: short, because tests wait for it."""


async def install(api: Api) -> str:
    """Applies the CRD and the operator's account with its rights, as the chart has them; the account's token.

    Applying them again changes nothing.
    """
    crd = YAML(typ="safe").load(CRD.read_text())
    await api.apply(crd)
    await api.wait("CustomResourceDefinition", None, crd["metadata"]["name"], _is_established)
    await api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE}})
    for item in rendered(namespace=SYSTEM_NAMESPACE):
        if item["kind"] in RIGHTS:
            await api.apply(item)
    return await token_of(api, SYSTEM_NAMESPACE, SERVICE_ACCOUNT)


async def token_of(api: Api, namespace: str, account: str) -> str:
    """A token of a service account, good for a day."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
    token = await api.request("POST", path, body)
    return str(token["status"]["token"])


def _is_established(item: Object | None) -> bool:
    return is_true(item, "Established")


class OperatorProcess:
    """`python -m kuberoll_operator` against one API server; may be started again after its end.

    Args:
        directory: For its kubeconfig and logs.
        url: Of the API server, or of a proxy before it.
        token: Of its service account.
        namespace: The one that it watches; None: all.
        authority: To verify an https URL by.
        lease: Name of the lease that elects the leader; operators of the same lease are replicas of one.
        settings: `{"progress_seconds": 0.5}`: more of the operator's settings.
    """

    def __init__(
        self,
        directory: Path,
        url: str,
        token: str,
        *,
        namespace: str | None,
        authority: Path | None = None,
        lease: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.name = f"operator-{uuid.uuid4().hex[:6]}"
        self.log = directory / f"{self.name}.log"
        self.http_port = free_port()
        file = directory / f"{self.name}.kubeconfig"
        file.write_text(json.dumps(kubeconfig(url, token, authority)))
        given: dict[str, object] = {
            "http_host": "127.0.0.1",
            "http_port": self.http_port,
            "lease_name": lease or self.name,
            "lease_namespace": SYSTEM_NAMESPACE,
            "lease_seconds": LEASE_SECONDS,
            "progress_seconds": 0.5,
            "token_key": "a key of the tests",
            **({"namespaces": namespace} if namespace else {}),
            **(settings or {}),
        }
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KUBE")},
            "KUBECONFIG": str(file),
            **{f"KUBEROLL_{name.upper()}": str(value) for name, value in given.items()},
        }
        self._process: ServerProcess | None = None

    def start(self, *, ready: bool = True) -> None:
        """Starts it; returns when it is ready, or at once.

        Raises:
            RuntimeError: It ended, or was not ready in time; with the end of its log.
        """
        self._process = ServerProcess([sys.executable, "-m", "kuberoll_operator"], self.log, self._environment)
        if ready:
            self._process.wait_until(self.is_ready)

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None, "the operator was not started"
        return self._process

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def is_running(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    def kill(self) -> None:
        """SIGKILL; may be called from any thread."""
        self.process.signal(signal.SIGKILL)
        self.process.process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.process.send_signal(signal.SIGTERM)
        return self.process.process.wait(30)

    def stop(self) -> None:
        """Ends it if it runs."""
        if self._process is not None:
            self._process.stop()
