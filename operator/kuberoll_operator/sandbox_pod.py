"""The pod that is a sandbox. Pure: equal requests give equal pods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_api import sandboxes
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import API_VERSION, KIND, RolloutJob
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_api.sandboxes import Placement, SandboxRequest
from kuberoll_operator import names
from kuberoll_operator.model import Key, Object
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.quantities import number_of

LEASE_ANNOTATION: Final = "kuberoll.io/lease-seconds"
"""Annotation of a sandbox's pod: it is removed when its worker has not been heard of for so long."""

RUNTIME_CONTAINER: Final = "runtime"
"""Name of the init container that brings the programs of the server inside."""

IDENTITY_CONTAINER: Final = "user"
"""Name of the init container that finds whom the image's commands run as."""

_RUNTIME_VOLUME: Final = "kuberoll"
_IDENTITY_VOLUME: Final = "kuberoll-user"
# What a root that is read-only has room for anyway.
_WRITABLE: Final = {"tmp": "/tmp", "run": "/run"}
_MIB: Final = 1 << 20
# Whoever cleans up counts from the pod's creation, and a sandbox from its server's start.
_SPARE_SECONDS: Final = 120
# The server inside ends with everything at once.
_GRACE_SECONDS: Final = 2
# Our images have the programs ready; of one that has not, they are made each time.
_COPY: Final = (
    f'if [ -n "${sandboxes.RUNTIME_VARIABLE}" ]; '
    f'then exec cp -R "${sandboxes.RUNTIME_VARIABLE}/." {sandboxes.RUNTIME_DIRECTORY}; fi; '
    f"exec python -m kuberoll_workers.sandboxes.runtime {sandboxes.RUNTIME_DIRECTORY}"
)
_LOST_NODE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_LOST_NODE_SECONDS: Final = 15
_COPY_MILLICORES: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """What the pods of a job's sandboxes are made of.

    Attributes:
        job: The RolloutJob.
        uid: Its uid.
        namespace: Its namespace.
        worker_image: Image of workers of jobs that name none.
        image_pull_policy: Of all containers; None: Kubernetes' default.
        run_as_user, run_as_group: Who brings the programs of the server; None: as the cluster chooses.
    """

    job: RolloutJob
    uid: str
    namespace: str
    worker_image: str
    image_pull_policy: str | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None

    @property
    def key(self) -> Key:
        """Namespace and name of the job."""
        return Key(self.namespace, self.job.metadata.name)

    def environment(self, name: str) -> Environment | None:
        """The environment of this name, if its trajectories have sandboxes."""
        for spec in self.job.spec.environments:
            if spec.name == name and spec.sandbox is not None:
                return spec
        return None


def pod_name(job: str, sandbox: str) -> str:
    """Name of a sandbox's pod."""
    return f"{job}-{sandbox}"


def problem(request: SandboxRequest, context: PodContext) -> str | None:
    """Why a job may not have such a sandbox, for people; None if it may."""
    spec = context.environment(request.environment)
    if spec is None or spec.sandbox is None:
        return f"the job has no environment {request.environment} with a sandbox"
    if request.network == "All" and (spec.sandbox.network is None or spec.sandbox.network.mode != "All"):
        return f"the environment {request.environment} does not allow network All (sandbox.network.mode)"
    limits = spec.sandbox.resources.limits
    for name, wanted in (("cpu", request.cpus), ("memory", request.memory), ("ephemeral-storage", request.storage)):
        if name in limits and (wanted is None or wanted > float(number_of(limits[name])) * (1 + 1e-9)):
            return f"the environment {request.environment} allows {limits[name]} of {name} (sandbox.resources.limits)"
    if request.total_seconds > spec.sandbox.total_seconds:
        return f"the environment {request.environment} allows {spec.sandbox.total_seconds:g} s (sandbox.totalSeconds)"
    return None


def build_pod(sandbox: str, request: SandboxRequest, context: PodContext, *, user: str | None = None) -> Object:
    """The pod of a sandbox that the job may have.

    Args:
        sandbox: Its name.
        user: Whom the image's commands run as, `uid:gid`; None: the pod has to find out, if the request asks for it.
    """
    if user is not None and request.identify:
        variables = {**request.variables, sandboxes.IDENTITY_VARIABLE: user}
        request = request.model_copy(update={"identify": [], "variables": variables})
    spec = context.environment(request.environment)
    assert spec is not None
    assert spec.sandbox is not None
    options = spec.sandbox
    labels = names.sandbox_labels(context.key.name, request.environment, request.worker, request.network)
    template: Object = {
        "metadata": {"labels": labels, "annotations": {LEASE_ANNOTATION: f"{request.lease_seconds:g}"}},
        "spec": {
            "activeDeadlineSeconds": math.ceil(request.start_seconds + request.total_seconds) + _SPARE_SECONDS,
            "automountServiceAccountToken": False,
            "containers": [_main(request, options, context)],
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "initContainers": [
                _runtime(request, context),
                *([_identity(request, context)] if request.identify else []),
            ],
            "restartPolicy": "Never",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "volumes": [
                {"name": _RUNTIME_VOLUME, "emptyDir": {}},
                *([{"name": _IDENTITY_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}] if request.identify else []),
                *([{"name": name, "emptyDir": {}} for name in _WRITABLE] if request.read_only else []),
            ],
            **_name_service(request),
        },
    }
    if options.runtime_class_name is not None:
        template["spec"]["runtimeClassName"] = options.runtime_class_name
    template = merge(template, options.pod_template or {})
    template["spec"] = _placed(template["spec"], request.placement)
    # By these the broker finds its pods, and a network policy whom it keeps from what.
    metadata = {**template["metadata"], "labels": {**(template["metadata"].get("labels") or {}), **labels}}
    metadata |= {
        "name": pod_name(context.key.name, sandbox),
        "namespace": context.namespace,
        "ownerReferences": [
            {"apiVersion": API_VERSION, "kind": KIND, "name": context.key.name, "uid": context.uid, "controller": True}
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _placed(spec: Object, placement: Placement) -> Object:
    """A pod's spec for the nodes that the job has quota on."""
    if placement.node_selector:
        spec = {**spec, "nodeSelector": {**spec.get("nodeSelector", {}), **placement.node_selector}}
    there = spec.get("tolerations", [])
    found = [*there, *(item for item in placement.tolerations if item not in there)]
    # A machine that nobody reaches ends with its lease, and one that was to start there is wanted elsewhere.
    for taint in _LOST_NODE:
        if not any(item.get("key", taint) == taint for item in found):
            found.append(
                {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_SECONDS}
            )
    return {**spec, "tolerations": found}


def _main(request: SandboxRequest, options: Sandbox, context: PodContext) -> Object:
    mounts: list[Object] = [{"name": _RUNTIME_VOLUME, "mountPath": sandboxes.RUNTIME_DIRECTORY, "readOnly": True}]
    if request.identify:
        mounts.append({"name": _IDENTITY_VOLUME, "mountPath": sandboxes.IDENTITY_DIRECTORY, "readOnly": True})
    if request.read_only:
        mounts += [{"name": name, "mountPath": path} for name, path in _WRITABLE.items()]
    made = _of_the_image(request, context) | {
        "name": sandboxes.CONTAINER,
        "command": [_plain(word) for word in request.command],
        "env": [{"name": name, "value": _plain(text)} for name, text in sorted(request.variables.items())],
        "ports": [{"name": sandboxes.CONTAINER, "containerPort": sandboxes.SANDBOX_PORT}],
        "securityContext": {
            # Its server is root and becomes whom a command is for; a task's own sudo works.
            "allowPrivilegeEscalation": True,
            "capabilities": {"add": list(sandboxes.CAPABILITIES), "drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": request.read_only,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "runAsUser": 0,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    if resources := _resources(request, options):
        made["resources"] = resources
    return made


def _runtime(request: SandboxRequest, context: PodContext) -> Object:
    """Brings the programs of the server inside, of the workers' release."""
    security: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    ids = {"runAsUser": context.run_as_user, "runAsGroup": context.run_as_group}
    security |= {name: number for name, number in ids.items() if number is not None}
    return {
        "name": RUNTIME_CONTAINER,
        "image": context.job.spec.workers.image or context.worker_image,
        "command": ["sh", "-c", _COPY],
        "resources": _copy_resources(request),
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": _RUNTIME_VOLUME, "mountPath": sandboxes.RUNTIME_DIRECTORY}],
        **_pull_policy(context),
    }


def _identity(request: SandboxRequest, context: PodContext) -> Object:
    """Runs as the image says, and notes who that is: a pod's own settings would hide it."""
    return _of_the_image(request, context) | {
        "name": IDENTITY_CONTAINER,
        "command": [_plain(word) for word in request.identify],
        "env": [{"name": name, "value": ""} for name in ("GLIBC_TUNABLES", "LD_AUDIT", "LD_PRELOAD")],
        "resources": _copy_resources(request),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": _RUNTIME_VOLUME, "mountPath": sandboxes.RUNTIME_DIRECTORY, "readOnly": True},
            {"name": _IDENTITY_VOLUME, "mountPath": sandboxes.IDENTITY_DIRECTORY},
        ],
    }


def _of_the_image(request: SandboxRequest, context: PodContext) -> Object:
    return {"image": request.image, **_pull_policy(context)}


def _pull_policy(context: PodContext) -> Object:
    return {"imagePullPolicy": context.image_pull_policy} if context.image_pull_policy else {}


def _resources(request: SandboxRequest, options: Sandbox) -> Object:
    """Limits are the request's; what is reserved is the job's to say, and by Kubernetes' rule else the limit."""
    limits = {
        "cpu": None if request.cpus is None else f"{_millicores(request.cpus)}m",
        "memory": _bytes(request.memory),
        "ephemeral-storage": _bytes(request.storage),
    }
    found: Object = {"limits": {name: amount for name, amount in limits.items() if amount is not None}}
    found["requests"] = {
        name: amount
        for name, amount in options.resources.requests.items()
        if (limit := found["limits"].get(name)) is None or number_of(amount) <= number_of(limit)
    }
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _copy_resources(request: SandboxRequest) -> Object:
    """Of what runs before the sandbox: with a limit of processors where that has one, as quotas of limits want it."""
    requests, limits = {"cpu": f"{_COPY_MILLICORES}m", "memory": "64Mi"}, {"memory": "256Mi"}
    if request.cpus is not None:
        millicores = _millicores(request.cpus)
        requests["cpu"], limits["cpu"] = f"{min(_COPY_MILLICORES, millicores)}m", f"{millicores}m"
    return {"requests": requests, "limits": limits}


def _millicores(cpus: float) -> int:
    return math.ceil(cpus * 1000)


def _bytes(count: int | None) -> str | None:
    if count is None:
        return None
    return f"{count // _MIB}Mi" if count % _MIB == 0 else str(count)


def _name_service(request: SandboxRequest) -> Mapping[str, Any]:
    """The node's for those with a network; nobody answers the others."""
    if request.network == "All":
        return {"dnsPolicy": "Default"}
    return {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}


def _plain(text: str) -> str:
    """A text in which Kubernetes replaces nothing: not `$(NAME)`, and not `$$`, which it makes one `$`."""
    return text.replace("$", "$$")
