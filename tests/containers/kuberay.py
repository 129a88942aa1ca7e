"""What KubeRay 1.7.0's operator makes of a RayService's pod templates: its commands, variables, probes and the init
container, by its ray-operator/controllers/ray/common/pod.go."""

from __future__ import annotations

import copy
from typing import Any

from tests.cluster.scheduling import quantities

Object = dict[str, Any]

HEAD_PORT = 6379
AGENT_PORT = 52365
DASHBOARD_PORT = 8265
AUTH_KEY = "auth_token"

_SHELL = ["/bin/bash", "-c", "--"]
_PROBE = {"periodSeconds": 5, "successThreshold": 1}
_WGET = "wget --tries 1 -T {seconds} -q -O- http://localhost:{port}/{path} | grep success"
_UNIFIED_HEALTH_SINCE = (2, 53)


def cluster_of(service: Object) -> str:
    """The name of a RayService's cluster, with the five characters that KubeRay adds."""
    return f"{service['metadata']['name']}-abcde"


def head_host(service: Object) -> str:
    """The name that the head's Service has in the cluster's DNS."""
    return f"{cluster_of(service)}-head-svc.{service['metadata']['namespace']}.svc.cluster.local"


def secret_of(service: Object, token: str) -> Object:
    """The Secret with the cluster's token, which KubeRay makes."""
    metadata = {"name": cluster_of(service), "namespace": service["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {AUTH_KEY: token}}


def head_service(service: Object) -> Object:
    """The headless Service of the head."""
    selector = {"ray.io/cluster": cluster_of(service), "ray.io/node-type": "head"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{cluster_of(service)}-head-svc", "namespace": service["metadata"]["namespace"]},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def head_template(service: Object) -> Object:
    """The pod template of the head."""
    group = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    return _pod(service, group, kind="head", name="headgroup", host="127.0.0.1")


def worker_template(service: Object, index: int = 0) -> Object:
    """The pod template of a group of engines."""
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][index]
    return _pod(service, group, kind="worker", name=group["groupName"], host=head_host(service))


def _pod(service: Object, group: Object, *, kind: str, name: str, host: str) -> Object:
    config = service["spec"]["rayClusterConfig"]
    template: Object = copy.deepcopy(group["template"])
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    fixed = {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster_of(service),
        "ray.io/node-type": kind,
        "ray.io/group": name,
        "ray.io/identifier": f"{cluster_of(service)}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
        "ray.io/serve": "false" if kind == "head" else "true",
    }
    labels.update({key: value for key, value in fixed.items() if key not in labels or key.startswith("ray.io/")})
    container = template["spec"]["containers"][0]
    env = container.setdefault("env", [])
    if config.get("authOptions", {}).get("mode") == "token":
        secret = {"secretKeyRef": {"name": cluster_of(service), "key": AUTH_KEY}}
        _add(env, {"name": "RAY_AUTH_MODE", "value": "token"}, {"name": "RAY_AUTH_TOKEN", "valueFrom": secret})
    if kind == "worker":
        template["spec"].setdefault("initContainers", []).append(_wait(container, host))
    _shared_memory(template, container)
    command = _ray_start(group, container, kind=kind, host=host)
    container["command"] = _SHELL
    container["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {command}"]
    _environment(env, command, kind=kind, host=host)
    version = tuple(int(part) for part in config["rayVersion"].split(".")[:2])
    _probes(container, group.get("rayStartParams", {}), kind=kind, unified=version >= _UNIFIED_HEALTH_SINCE)
    return template


def _add(env: list[Object], *items: Object) -> None:
    known = {item["name"] for item in env}
    env.extend(item for item in items if item["name"] not in known)


def _field(path: str) -> Object:
    return {"fieldRef": {"fieldPath": path}}


def _environment(env: list[Object], command: str, *, kind: str, host: str) -> None:
    if kind == "worker":
        env.extend([{"name": "FQ_RAY_IP", "value": host}, {"name": "RAY_IP", "value": host.partition(".")[0]}])
    env.extend(
        [
            {"name": "RAY_CLUSTER_NAME", "valueFrom": _field("metadata.labels['ray.io/cluster']")},
            {"name": "RAY_CLUSTER_NAMESPACE", "valueFrom": _field("metadata.namespace")},
            {"name": "RAY_CLOUD_INSTANCE_ID", "valueFrom": _field("metadata.name")},
            {"name": "RAY_NODE_TYPE_NAME", "valueFrom": _field("metadata.labels['ray.io/group']")},
            {"name": "KUBERAY_GEN_RAY_START_CMD", "value": command},
        ]
    )
    defaults = {
        "RAY_PORT": str(HEAD_PORT),
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_ADDRESS": f"{host}:{HEAD_PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        **({"RAY_USAGE_STATS_EXTRA_TAGS": "kuberay_version=v1.7.0;kuberay_crd=RayService"} if kind == "head" else {}),
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    _add(env, *({"name": name, "value": value} for name, value in defaults.items()))


def _ray_start(group: Object, container: Object, *, kind: str, host: str) -> str:
    params = dict(group.get("rayStartParams", {}))
    if kind == "worker":
        params.setdefault("address", f"{host}:{HEAD_PORT}")
    else:
        params.setdefault("dashboard-host", "0.0.0.0")
    params |= {"block": "true", "metrics-export-port": params.get("metrics-export-port", "8080")}
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    limits = quantities(container.get("resources", {}).get("limits", {}))
    requests = quantities(container.get("resources", {}).get("requests", {}))
    if cpu := limits.get("cpu") or requests.get("cpu"):
        params.setdefault("num-cpus", str(-(-cpu // 1)))
    if "memory" in limits:
        params.setdefault("memory", str(int(limits["memory"])))
    if "nvidia.com/gpu" in limits:
        params.setdefault("num-gpus", str(int(limits["nvidia.com/gpu"])))
    words = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in sorted(params.items())]
    return " ".join(["ray start", *(["--head"] if kind == "head" else []), *words])


def _shared_memory(template: Object, container: Object) -> None:
    mounts = container.setdefault("volumeMounts", [])
    if all(mount["mountPath"] != "/dev/shm" for mount in mounts):
        memory = container.get("resources", {}).get("requests", {}).get("memory")
        source = {"medium": "Memory", **({"sizeLimit": memory} if memory else {})}
        template["spec"].setdefault("volumes", []).append({"name": "shared-mem", "emptyDir": source})
        mounts.append({"name": "shared-mem", "mountPath": "/dev/shm"})


def _wait(container: Object, host: str) -> Object:
    """The init container that waits for the head: with the engine's variables and mounts, and limits of its own."""
    check = f"ray health-check --address {host}:{HEAD_PORT}"
    made = {key: copy.deepcopy(container[key]) for key in ("image", "securityContext", "env", "volumeMounts")}
    made["env"] += [{"name": "FQ_RAY_IP", "value": host}, {"name": "RAY_IP", "value": host.partition(".")[0]}]
    amounts = {"cpu": "200m", "memory": "256Mi"}
    return {
        **made,
        "name": "wait-gcs-ready",
        "command": _SHELL,
        "args": [f"until {check} > /dev/null 2>&1; do echo waiting for the GCS; sleep 5; done"],
        "resources": {"limits": amounts, "requests": amounts},
    }


def _probes(container: Object, params: Object, *, kind: str, unified: bool) -> None:
    """Those that KubeRay gives a container that has none."""
    port = int(params.get("dashboard-agent-listen-port", AGENT_PORT))
    commands = [_WGET.format(seconds=2, port=port, path="api/local_raylet_healthz")]
    if kind == "head":
        dashboard = int(params.get("dashboard-port", DASHBOARD_PORT))
        commands.append(_WGET.format(seconds=10, port=dashboard, path="api/gcs_healthz"))
    health: Object = {"httpGet": {"path": "/api/healthz", "port": port}} if unified else _in_shell(commands)
    timeout = 5 if kind == "head" else 2
    live = {**_PROBE, **health, "initialDelaySeconds": 30, "timeoutSeconds": timeout, "failureThreshold": 120}
    container.setdefault("livenessProbe", live)
    ready = {**_PROBE, **health, "initialDelaySeconds": 10, "timeoutSeconds": timeout, "failureThreshold": 10}
    if kind == "worker":
        serve = next(
            (item["containerPort"] for item in container.get("ports", ()) if item.get("name") == "serve"), 8000
        )
        commands.append(_WGET.format(seconds=10, port=serve, path="-/healthz"))
        ready = {**_PROBE, **_in_shell(commands), "initialDelaySeconds": 10, "timeoutSeconds": 2, "failureThreshold": 1}
    container.setdefault("readinessProbe", ready)


def _in_shell(commands: list[str]) -> Object:
    return {"exec": {"command": ["bash", "-c", " && ".join(commands)]}}
