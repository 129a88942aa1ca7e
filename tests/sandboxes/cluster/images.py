"""Images for the nodes of a cluster: each has a registry of the tests' own at an address that it trusts.

containerd asks registries at 127.0.0.1 without TLS, so a pod on each node's own network serves that node.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import inspect
import json
import secrets
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.harbor import registry
from tests.sandboxes.cluster.kubectl import Kubectl, Object
from tests.sandboxes.layouts import write_layout

_REPOSITORY: Final = "kuberoll-tests"
_SECONDS: Final = 120
# One and the same: a node keeps images between runs, by their names.
_PORT: Final = 20791
_SERVE: Final = f"import registry; registry.Registry('', {_PORT}).serve_forever()"


class NodeImages:
    """Registries on the nodes of a cluster.

    Args:
        nodes: Their addresses, by their names.
    """

    def __init__(self, nodes: dict[str, str]) -> None:
        self._nodes = nodes

    def push(self, name: str, reference: str, place: Path) -> str:
        """Have an image in all of them; returns its name there.

        Args:
            name: A word of its tag.
            reference: `oci:DIRECTORY` or `docker-archive:FILE`.
            place: Directory for the files of an archive.
        """
        kind, _, path = reference.partition(":")
        layout = Path(path)
        if kind == "docker-archive":
            layout = place / name
            _unpack(Path(path), layout)
        index = json.loads((layout / "index.json").read_text())
        manifest = _blob(layout, index["manifests"][0]["digest"])
        tag = f"{name}-{hashlib.sha256(manifest).hexdigest()[:12]}"
        content = json.loads(manifest)
        for address in self._nodes.values():
            connection = http.client.HTTPConnection(address, _PORT, timeout=_SECONDS)
            for entry in (content["config"], *content["layers"]):
                _put(connection, _blob(layout, entry["digest"]), entry["digest"])
            _request(connection, "PUT", f"/v2/{_REPOSITORY}/manifests/{tag}", manifest, content["mediaType"])
            connection.close()
        return f"127.0.0.1:{_PORT}/{_REPOSITORY}:{tag}"


@contextmanager
def registries(kubectl: Kubectl, image: str) -> Iterator[NodeImages]:
    """Have a registry on each node that takes pods, in a namespace of their own.

    Args:
        image: An image with `python3` that the nodes have or can pull.
    """
    nodes = {
        item["metadata"]["name"]: next(
            one["address"] for one in item["status"]["addresses"] if one["type"] == "InternalIP"
        )
        for item in kubectl.read("get", "nodes")["items"]
        if not item["spec"].get("unschedulable") and _is_ready(item)
    }
    namespace = f"kuberoll-test-registries-{secrets.token_hex(4)}"
    code = {"registry.py": inspect.getsource(registry)}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": namespace}}
    try:
        # They are on the network of their node.
        kubectl.make_namespace(namespace, "privileged")
        kubectl.apply(
            {**config, "data": code},
            *(_pod(namespace, name, image) for name in nodes),
        )
        kubectl.run(
            "wait", "pod", "--all", f"--namespace={namespace}", "--for=condition=Ready", f"--timeout={_SECONDS}s"
        )
        yield NodeImages(nodes)
    finally:
        kubectl.remove_namespace(namespace)


def _pod(namespace: str, node: str, image: str) -> Object:
    container = {
        "name": "registry",
        "image": image,
        "command": ["python3", "-u", "-c", _SERVE],
        "workingDir": "/code",
        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/v2/", "port": _PORT}, "periodSeconds": 1},
    }
    spec: Object = {
        "nodeName": node,
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "code", "configMap": {"name": "code"}}],
    }
    metadata = {"name": f"registry-{node}", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _is_ready(node: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"]["conditions"])


def _put(connection: http.client.HTTPConnection, content: bytes, digest: str) -> None:
    """Write a blob, at once."""
    place = _request(connection, "POST", f"/v2/{_REPOSITORY}/blobs/uploads/", b"")
    _request(connection, "PUT", f"{urlsplit(place).path}?digest={digest}", content)


def _request(
    connection: http.client.HTTPConnection, method: str, path: str, content: bytes, media: str | None = None
) -> str:
    connection.request(method, path, content, {"Content-Type": media or "application/octet-stream"})
    answer = connection.getresponse()
    said = answer.read()
    assert answer.status < 300, (method, path, answer.status, said)
    return answer.getheader("Location") or ""


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / Path(*digest.split(":"))).read_bytes()


def _unpack(archive: Path, layout: Path) -> None:
    """Make a layout of a file of `docker save`."""
    with tarfile.open(archive) as opened:

        def content(name: str) -> bytes:
            member = opened.extractfile(name)
            assert member is not None
            return member.read()

        [described] = json.loads(content("manifest.json"))
        config = json.loads(content(described["Config"]))["config"]
        layers = [content(name) for name in described["Layers"]]
    write_layout(layout, layers, config, packed=lambda data: gzip.compress(data, 1))
