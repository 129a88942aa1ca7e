"""kubectl with the kubeconfig that a test was given: it knows every way to be somebody."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.cluster.control_plane import MissingBinaries, find_binaries, kubeconfig

Object = dict[str, Any]
_SECONDS = 180


class KubectlError(Exception):
    """It failed; the message is what it said."""


class Kubectl:
    """The cluster that a kubeconfig names.

    Args:
        config: The kubeconfig.
        namespace: Namespace of what has one and says none.

    Raises:
        MissingBinaries: There is no kubectl.
    """

    def __init__(self, config: Path, namespace: str | None = None) -> None:
        if not config.is_file():
            raise MissingBinaries(f"{config}: no kubeconfig")
        self._command = [str(find_binaries("kubectl")["kubectl"]), f"--kubeconfig={config}"]
        if namespace is not None:
            self._command.append(f"--namespace={namespace}")

    def run(self, *arguments: str, given: object = None) -> str:
        """Run it; returns what it writes.

        Args:
            given: Its input, as JSON.

        Raises:
            KubectlError: It failed.
        """
        done = subprocess.run(
            [*self._command, *arguments],
            input=None if given is None else json.dumps(given),
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def read(self, *arguments: str) -> Object:
        """An object, or a list of them, of `get` or `create`."""
        found: Object = json.loads(self.run(*arguments, "--output=json"))
        return found

    def apply(self, *items: Object) -> None:
        """Have objects as they are given."""
        whole = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        self.run("apply", "--server-side", "--force-conflicts", "--filename=-", given=whole)

    def make_namespace(self, name: str, security: str) -> None:
        """Make a namespace that admits pods of a level of Pod Security, and wait until it takes any."""
        labels = {"pod-security.kubernetes.io/enforce": security}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self.run("wait", "serviceaccount/default", f"--namespace={name}", "--for=create", "--timeout=60s")

    def remove_namespace(self, name: str) -> None:
        """Remove a namespace with all that is in it."""
        self.run("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")

    def kubeconfig_of(self, account: str, place: Path) -> Path:
        """Write the kubeconfig of a service account, good for a day.

        Args:
            place: Directory for it and the certificate of the API server.
        """
        [cluster] = (
            item["cluster"] for item in self.read("config", "view", "--minify", "--raw", "--flatten")["clusters"]
        )
        authority = None
        if data := cluster.get("certificate-authority-data"):
            authority = place / "authority.pem"
            authority.write_bytes(base64.b64decode(data))
        token = self.run("create", "token", account, "--duration=24h").strip()
        found = place / f"{account}.kubeconfig"
        found.write_text(json.dumps(kubeconfig(cluster["server"], token, authority)))
        return found
