"""Parts that all pods of a job have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kuberoll_api.contract import DATASET_DIRECTORY
from kuberoll_api.model.dataset import DatasetSource
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.output_location import OUTPUT_DIRECTORY, output_of
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import merge, merge_named
from kuberoll_operator.render.config import CONFIG_DIRECTORY, FILES_DIRECTORY, STATE_DIRECTORY
from kuberoll_operator.render.context import Assignment, RenderContext

TEMPORARY_DIRECTORY: Final = "/tmp"

POD_IP: Final[Mapping[str, Any]] = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


STATE_VARIABLES: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "HF_HOME", "value": f"{STATE_DIRECTORY}/huggingface"},
    {"name": "HOME", "value": STATE_DIRECTORY},
)
"""Variables by which a program writes its caches into its state directory."""


LOCAL_VOLUMES: Final = ("state", "tmp")
"""Volumes of all pods on their node's disk; nothing in them is needed after the pod."""

# Who removes nodes to save money is told what a pod's move costs.
#
# An engine reads a model for minutes, with its GPUs idle and its share of the run waiting: neither autoscaler takes it
# away to save a node. Draining a node by hand, expiring and repairing it still do.
STAYS: Final[Mapping[str, str]] = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations of pods whose start costs much: of engines and services."""

# A worker loses no more than what it cannot finish in its grace period. Cluster Autoscaler empties a node that has been
# little used for minutes, and would keep it for a volume on its disk, in which a worker keeps nothing. Karpenter would
# also move workers, again and again, to nodes that are a little cheaper.
DRAINS: Final[Mapping[str, str]] = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": ",".join(LOCAL_VOLUMES),
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations of pods that finish what they have in hand: of workers, the check and the aggregation."""


def spread(selector: Mapping[str, str]) -> list[Object]:
    """Topology spread constraints by which the loss of a node takes as few of these pods as may be.

    They are wishes, because a pod that runs beside another is better than one that waits. Nothing tells versions of a
    template apart (`matchLabelKeys`): engines that run keep theirs.
    """
    return [
        {
            "labelSelector": {"matchLabels": dict(selector)},
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
        }
    ]


class Volumes:
    """Volumes of a pod, and their mounts in its container."""

    def __init__(self) -> None:
        self.volumes: list[Object] = []
        self.mounts: list[Object] = []

    def add(self, name: str, path: str, source: Mapping[str, Any], *, read_only: bool = False) -> None:
        """Add a volume and mount it at a path."""
        self.volumes.append({"name": name, **source})
        self.mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})


def standard_volumes(context: RenderContext) -> Volumes:
    """The configuration, the program's state directory, and /tmp."""
    volumes = Volumes()
    volumes.add("config", CONFIG_DIRECTORY, {"configMap": {"name": names.config(context.name)}}, read_only=True)
    volumes.add("state", STATE_DIRECTORY, {"emptyDir": {}})
    volumes.add("tmp", TEMPORARY_DIRECTORY, {"emptyDir": {}})
    return volumes


def engine_volumes(context: RenderContext) -> Volumes:
    """The standard volumes, and shared memory, through which processes of a model that is spread over GPUs talk."""
    volumes = standard_volumes(context)
    volumes.add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    return volumes


def data_volumes(context: RenderContext) -> Volumes:
    """The standard volumes, and those of the dataset, the job's files and the output."""
    volumes = standard_volumes(context)
    if (files := context.job.spec.workers.files) is not None:
        named = files.config_map.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        volumes.add("files", FILES_DIRECTORY, {"configMap": named}, read_only=True)
    dataset = context.job.spec.dataset
    if dataset.source is not None:
        _add_dataset(volumes, dataset.source, "dataset", DATASET_DIRECTORY)
    for number, part in enumerate(dataset.sources):
        _add_dataset(volumes, part.source, f"dataset-{number}", f"{DATASET_DIRECTORY}/{number}")
    if (output := output_of(context.job.spec.output.uri)).claim is not None:
        volumes.add("output", OUTPUT_DIRECTORY, {"persistentVolumeClaim": {"claimName": output.claim}})
    return volumes


def _add_dataset(volumes: Volumes, source: DatasetSource, name: str, path: str) -> None:
    """Add the volume of a source of rows, if it is one."""
    if source.config_map is not None:
        volumes.add(name, path, {"configMap": {"name": source.config_map.name}}, read_only=True)
    if source.pvc is not None:
        claim = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
        volumes.add(name, path, claim, read_only=True)


def container(
    context: RenderContext,
    options: PodOptions,
    *,
    name: str,
    module: str | None,
    image: str,
    env: Sequence[Mapping[str, Any]],
    volumes: Volumes,
    read_only: bool,
    arguments: Sequence[str] = (),
    **fields: Any,
) -> Object:
    """The single container of a pod, which runs a Python module.

    Args:
        module: Module to run; None if another controller sets the command.
        image: Default, for jobs that name none.
        env: Variables; those of the job take precedence.
        read_only: True for a read-only root filesystem.
        arguments: Arguments of the module, after --config.
        fields: Additional fields of the container: ports, probes.
    """
    security: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if read_only:
        security["readOnlyRootFilesystem"] = True
    config = f"{CONFIG_DIRECTORY}/{names.CONFIG_KEY}"
    made: Object = {
        "name": name,
        "image": options.image or image,
        **({"command": ["python", "-m", module, "--config", config, *arguments]} if module else {}),
        "env": merge_named(env, plain(options.env), "name", replace=True),
        "volumeMounts": volumes.mounts,
        "securityContext": security,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **fields,
    }
    if resources := options.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True):
        made["resources"] = resources
    if context.settings.image_pull_policy:
        made["imagePullPolicy"] = context.settings.image_pull_policy
    return made


def pod_template(
    context: RenderContext,
    options: PodOptions,
    *,
    component: str,
    container: Object,
    volumes: Volumes,
    grace_seconds: int,
    restart_policy: str,
    over: Mapping[str, Any] | None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] = MappingProxyType({}),
    apart: Sequence[Object] = (),
    affinity: Mapping[str, Any] | None = None,
    pod_set: str | None = None,
) -> Object:
    """A pod template; the labels by which the job's pods are found override all others.

    Args:
        labels: These labels; None for the usual ones.
        annotations: Annotations; those of the user's template take precedence.
        apart: Topology spread constraints.
        affinity: Affinity; None for none.
        over: The user's template, merged last.
        pod_set: Pod set whose quota the pods use; None for the one named after the component.
    """
    security: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    # The kubelet would take the user from the image and leave the group at root.
    user, group = context.settings.run_as_user, context.settings.run_as_group
    security |= {key: value for key, value in (("runAsUser", user), ("runAsGroup", group)) if value is not None}
    if context.settings.fs_group is not None and any(item["name"] == "output" for item in volumes.volumes):
        security |= fs_group(context.settings.fs_group)
    spec: Object = {
        "automountServiceAccountToken": False,
        "containers": [container],
        # A Service called vllm would set VLLM_PORT, which vLLM reads.
        "enableServiceLinks": False,
        "restartPolicy": restart_policy,
        "securityContext": security,
        "terminationGracePeriodSeconds": grace_seconds,
        "volumes": volumes.volumes,
    }
    optional = {
        "affinity": affinity,
        "nodeSelector": dict(options.node_selector),
        "topologySpreadConstraints": plain(apart),
    }
    spec |= {key: value for key, value in optional.items() if value}
    own = dict(names.labels(context.name, component) if labels is None else labels)
    metadata: Object = {"labels": own}
    if annotations:
        metadata["annotations"] = dict(annotations)
    template = merge({"metadata": metadata, "spec": spec}, over or {})
    return _assigned(merge(template, {"metadata": {"labels": own}}), context.assignments.get(pod_set or component))


def fs_group(number: int) -> Object:
    """Of a pod's security context: the group that may write to its claims."""
    return {"fsGroup": number, "fsGroupChangePolicy": "OnRootMismatch"}


def plain(items: Sequence[Any]) -> list[Any]:
    """A deep copy of JSON values, safe to change and to pass on."""
    return json.loads(json.dumps(list(items)))  # type: ignore[no-any-return]


def _assigned(template: Object, assignment: Assignment | None) -> Object:
    """A pod template with the constraints of its quota's admission."""
    if assignment is None:
        return template
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    for key, given in (("labels", assignment.labels), ("annotations", assignment.annotations)):
        if given:
            metadata[key] = {**given, **metadata.get(key, {})}
    if assignment.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **assignment.node_selector}
    there = spec.get("tolerations", [])
    if new := [item for item in plain(assignment.tolerations) if item not in there]:
        spec["tolerations"] = [*there, *new]
    return {**template, "metadata": metadata, "spec": spec}
