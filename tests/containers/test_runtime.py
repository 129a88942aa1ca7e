"""What the tests' kubelet and containerd make of a pod's spec, seen from inside its containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.containers.images import PYTHON
from tests.containers.node import ContainerNode, ended, is_ready, phase, pod_of, waiting

Object = dict[str, Any]

pytestmark = pytest.mark.timeout(300, func_only=True)
SECONDS = 240.0

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CLOSED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
STATUS = """
import json, os, pathlib
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
status = dict(line.split(":\\t") for line in lines if ":\\t" in line)
def writable(path):
    try:
        pathlib.Path(path, "x").write_text("")
    except OSError as error:
        return os.strerror(error.errno)
    return True
paths = ["/", "/etc", "/tmp", "/usr/local", "/claim", "/memory", "/config"]
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": sorted(os.getgroups()), "status": status,
    "writable": {path: writable(path) for path in paths}, "hostname": os.uname().nodename,
    "memory": os.statvfs("/memory").f_blocks * os.statvfs("/memory").f_frsize,
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "environment": dict(os.environ), "config": pathlib.Path("/config/app.json").read_text(),
    "kcore": len(pathlib.Path("/proc/kcore").read_bytes()) if pathlib.Path("/proc/kcore").is_file() else 0,
}))
"""
FOREVER = "import signal; signal.pause()"


def pod(name: str, code: str, *, restart: str = "Never", spec: Mapping[str, Any] | None = None, **main: Any) -> Object:
    container = {"name": "main", "image": PYTHON, "command": ["python3", "-c", code], **main}
    given = {"containers": [container], "restartPolicy": restart, "automountServiceAccountToken": False, **(spec or {})}
    return pod_of({"metadata": {"name": name, "namespace": "tests"}, "spec": {"template": {"spec": given}}}, name)


async def test_a_restricted_pod_has_what_its_spec_says_and_no_more(node: ContainerNode) -> None:
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "store"}},
        {"name": "config", "configMap": {"name": "app"}},
    ]
    mounts = [{"name": item["name"], "mountPath": f"/{item['name']}"} for item in volumes]
    env = [
        {"name": "PLAIN", "value": "$(NAME) is $$(NAME)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "EXPANDED", "value": "$(NAME).$(KEY)"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}},
    ]
    await node.put(
        {"kind": "ConfigMap", "metadata": {"name": "app"}, "data": {"app.json": "{}"}},
        {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"a": "hush"}},
    )
    source = [{"secretRef": {"name": "keys"}, "prefix": "ALL_"}]
    main: Object = {"env": env, "envFrom": source, "volumeMounts": mounts, "securityContext": CLOSED}
    made = pod(
        "restricted", STATUS, **main, spec={"securityContext": {**RESTRICTED, "fsGroup": 3000}, "volumes": volumes}
    )
    node.run(made)
    done = await node.until("restricted", lambda item: phase(item) in ("Succeeded", "Failed"), SECONDS)
    assert phase(done) == "Succeeded", node.log("restricted")
    seen = json.loads(node.log("restricted").partition("\n")[2])
    assert (seen["uid"], seen["gid"], seen["groups"]) == (65532, 65532, [3000, 65532])
    status = {name: value.strip() for name, value in seen["status"].items()}
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    read_only = "Read-only file system"
    assert seen["writable"] == {
        "/": read_only, "/etc": read_only, "/usr/local": read_only, "/config": read_only,
        "/tmp": True, "/claim": True, "/memory": True,
    }  # fmt: skip
    assert (seen["memory"], seen["shm"], seen["kcore"]) == (32 << 20, 64 << 20, 0)
    assert seen["hostname"] == "restricted"
    environment = seen["environment"]
    assert environment["PLAIN"] == "$(NAME) is $(NAME)"
    assert environment["EXPANDED"] == "restricted.$(KEY)"
    assert environment["IP"] == done["status"]["podIP"]
    assert (environment["SECRET"], environment["ALL_a"]) == ("hush", "hush")
    assert (node.claim("tests", "store") / "x").stat().st_gid == 3000


async def test_a_user_without_a_group_of_his_own_has_roots(node: ContainerNode) -> None:
    user = {"runAsUser": 65532}
    node.run(pod("stranger", "import os; print(os.getuid(), os.getgid())", spec={"securityContext": user}))
    await node.until("stranger", lambda item: phase(item) == "Succeeded", SECONDS)
    assert "65532 0" in node.log("stranger")


async def test_an_image_that_would_be_root_is_refused(node: ContainerNode) -> None:
    node.run(pod("root", FOREVER, spec={"securityContext": {"runAsNonRoot": True}}))
    seen = await node.until("root", waiting_for("CreateContainerConfigError"), SECONDS)
    assert "image will run as root" in waiting(seen)["message"]


def waiting_for(reason: str) -> Any:
    return lambda item: waiting(item).get("reason") == reason


async def test_who_needs_more_than_its_limit_is_killed(node: ContainerNode) -> None:
    code = "held = []\nwhile True: held.append(bytearray(1 << 20))"
    node.run(pod("large", code, resources={"limits": {"memory": "64Mi"}}))
    done = await node.until("large", lambda item: phase(item) == "Failed", SECONDS)
    assert (ended(done)["exitCode"], ended(done)["reason"]) == (137, "OOMKilled")


async def test_a_termination_message_is_what_was_written_or_the_end_of_the_log(node: ContainerNode) -> None:
    user = {"securityContext": RESTRICTED}
    said = "open('/dev/termination-log', 'w').write('the cause'); raise SystemExit(78)"
    node.run(pod("said", said, spec=user, terminationMessagePolicy="FallbackToLogsOnError"))
    logged = "raise SystemExit('no such model')"
    node.run(pod("logged", logged, spec=user, terminationMessagePolicy="FallbackToLogsOnError"))
    done = await node.until("said", lambda item: phase(item) == "Failed", SECONDS)
    assert (ended(done)["exitCode"], ended(done)["message"]) == (78, "the cause")
    done = await node.until("logged", lambda item: phase(item) == "Failed", SECONDS)
    assert (ended(done)["exitCode"], ended(done)["message"]) == (1, "no such model\n")


async def test_a_pod_has_its_grace_period_and_no_longer(node: ContainerNode) -> None:
    polite = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('up', flush=True); "
    node.run(pod("polite", polite + "signal.pause()"))
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    node.run(pod("deaf", deaf + "while True: signal.pause()", spec={"terminationGracePeriodSeconds": 1}))
    for name, code in (("polite", 75), ("deaf", 137)):
        await node.until(name, lambda item: phase(item) == "Running", SECONDS)
        await node.until_log(name, "up", SECONDS)
        assert ended(await node.delete(name))["exitCode"] == code


SERVER = "python3 -u -m http.server --directory /tmp 8000"


@pytest.mark.parametrize(
    ("probe", "passes"),
    [
        ({"httpGet": {"path": "/", "port": "http"}}, True),
        ({"httpGet": {"path": "/missing", "port": "http"}}, False),
        ({"tcpSocket": {"port": 8000}}, True),
        ({"tcpSocket": {"port": 8001}}, False),
        (
            {"exec": {"command": ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000')"]}},
            True,
        ),
        ({"exec": {"command": ["bash", "-c", "wget -q -O- http://localhost:8000"]}}, False),
    ],
)
async def test_probes_are_asked_as_the_kubelet_asks(node: ContainerNode, probe: Object, passes: bool) -> None:
    ports = [{"name": "http", "containerPort": 8000}]
    made = pod("probed", "", readinessProbe={**probe, "timeoutSeconds": 5}, ports=ports)
    made["spec"]["containers"][0]["command"] = SERVER.split()
    node.run(made)
    await node.until("probed", lambda item: phase(item) == "Running", SECONDS)
    if passes:
        await node.until("probed", is_ready, SECONDS)
        return
    # Those who pass are ready by the first probe that is answered; this one was asked several times.
    await node.until_log("probed", "Serving HTTP", SECONDS)
    await asyncio.sleep(3 * node.probe_seconds)
    assert not is_ready(node.pod("probed"))


async def test_pods_find_services_by_name(node: ContainerNode) -> None:
    def service(name: str, **spec: Any) -> Object:
        ports = [{"port": 80, "targetPort": 8000, "protocol": "TCP"}]
        metadata = {"name": name, "namespace": "tests"}
        return {"kind": "Service", "metadata": metadata, "spec": {"selector": {"app": "web"}, "ports": ports, **spec}}

    await node.put(service("web"), service("each", clusterIP="None"))
    server = pod("server", "", readinessProbe={"tcpSocket": {"port": 8000}})
    server["spec"]["containers"][0]["command"] = SERVER.split()
    server["metadata"]["labels"] = {"app": "web"}
    node.run(server)
    ready = await node.until("server", is_ready, SECONDS)
    code = (
        "import socket, urllib.request as r; print(socket.gethostbyname('each.tests.svc'));"
        "print(r.urlopen('http://web.tests.svc/').status, r.urlopen('http://each:8000/').status)"
    )
    node.run(pod("client", code))
    await node.until("client", lambda item: phase(item) == "Succeeded", SECONDS)
    assert f"{ready['status']['podIP']}\n200 200" in node.log("client")
