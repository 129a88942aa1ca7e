"""Pods' specs as the messages that a kubelet sends to its container runtime: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.cluster.scheduling import quantities
from tests.containers.containerd import cri

Object = dict[str, Any]

CPU_PERIOD = 100_000
"""Microseconds over which a CPU limit is counted."""

# The kubelet's, for `procMount: Default`.
MASKED_PATHS = (
    "/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
    "/sys/devices/virtual/powercap",
)  # fmt: skip
READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


class Refused(Exception):
    """The kubelet would not start the container: the message of its reason CreateContainerConfigError."""


def pod_config(pod: Object, *, logs: Path, dns: str, attempt: int = 0) -> Any:
    """The configuration of a pod's namespaces.

    Args:
        pod: The pod.
        logs: Directory of its containers' logs.
        dns: Address of the cluster's DNS server.
        attempt: How often the pod's namespaces were made before.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    security = spec.get("securityContext", {})
    suffix = "svc.cluster.local"
    searches = [f"{metadata['namespace']}.{suffix}", suffix, "cluster.local"]
    sandbox = cri.LinuxSandboxSecurityContext(
        run_as_user=_int64(security.get("runAsUser")),
        run_as_group=_int64(security.get("runAsGroup")),
        supplemental_groups=groups(pod),
        seccomp=_seccomp(security, {}),
        namespace_options=_namespaces(spec),
    )
    sysctls = {item["name"]: item["value"] for item in security.get("sysctls", ())}
    return cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(
            name=metadata["name"], uid=metadata["uid"], namespace=metadata["namespace"], attempt=attempt
        ),
        hostname=spec.get("hostname") or metadata["name"][:63],
        log_directory=str(logs),
        dns_config=cri.DNSConfig(servers=[dns], searches=searches, options=["ndots:5"]),
        labels=metadata.get("labels", {}),
        linux=cri.LinuxPodSandboxConfig(security_context=sandbox, sysctls=sysctls),
    )


def container_config(
    pod: Object,
    container: Object,
    *,
    image: Any,
    command: Sequence[str],
    args: Sequence[str],
    environment: Mapping[str, str],
    mounts: Sequence[Any],
    log: str,
    attempt: int,
) -> Any:
    """The configuration of a container.

    Args:
        pod: The pod.
        container: Its container's spec.
        image: What the runtime says of the image.
        command: In place of the image's entrypoint; empty: that.
        args: In place of the image's command; empty: that, where `command` is empty too.
        environment: Over the image's own.
        mounts: Of volumes and the kubelet's own files.
        log: Path of its log, below the pod's directory of logs.
        attempt: How often it was started before.

    Raises:
        Refused: It must not be root, and would be, or its image does not say.
    """
    pod_security, security = pod["spec"].get("securityContext", {}), container.get("securityContext", {})

    def setting(name: str) -> Any:
        return security.get(name, pod_security.get(name))

    user, name = setting("runAsUser"), ""
    if user is None:
        # Only the user: the group of an image's `USER 1:2` is not taken.
        user, name = (image.uid.value if image.HasField("uid") else None), image.username
    if setting("runAsNonRoot"):
        _check_user(container, user, name, given=setting("runAsUser") is not None)
    capabilities = security.get("capabilities", {})
    linux = cri.LinuxContainerSecurityContext(
        capabilities=cri.Capability(
            add_capabilities=capabilities.get("add", ()), drop_capabilities=capabilities.get("drop", ())
        ),
        privileged=security.get("privileged", False),
        namespace_options=_namespaces(pod["spec"]),
        run_as_user=_int64(user),
        run_as_group=_int64(setting("runAsGroup")),
        run_as_username="" if user is not None else name,
        readonly_rootfs=security.get("readOnlyRootFilesystem", False),
        supplemental_groups=groups(pod),
        no_new_privs=security.get("allowPrivilegeEscalation") is False,
        masked_paths=MASKED_PATHS,
        readonly_paths=READ_ONLY_PATHS,
        seccomp=_seccomp(pod_security, security),
    )
    return cri.ContainerConfig(
        metadata=cri.ContainerMetadata(name=container["name"], attempt=attempt),
        image=cri.ImageSpec(image=image.id),
        command=command,
        args=args,
        working_dir=container.get("workingDir", ""),
        envs=[cri.KeyValue(key=name, value=value) for name, value in environment.items()],
        mounts=mounts,
        log_path=log,
        linux=cri.LinuxContainerConfig(resources=resources(container), security_context=linux),
    )


def _check_user(container: Object, user: int | None, name: str, *, given: bool) -> None:
    place = f'container "{container["name"]}"'
    if user == 0 or (user is None and not name):
        why = "container's runAsUser breaks non-root policy" if given else "image will run as root"
        raise Refused(f"container has runAsNonRoot and {why} ({place})")
    if user is None:
        raise Refused(f"container has runAsNonRoot and image has non-numeric user ({name}) ({place})")


def groups(pod: Object) -> list[int]:
    """Groups besides the first one: those of the pod, and its volumes'."""
    security = pod["spec"].get("securityContext", {})
    given = security.get("supplementalGroups", [])
    return [*given, *([security["fsGroup"]] if "fsGroup" in security else [])]


def resources(container: Object) -> Any:
    """Limits of a container, for its cgroup."""
    limits = quantities(container.get("resources", {}).get("limits", {}))
    requests = quantities(container.get("resources", {}).get("requests", {}))
    cpu = limits.get("cpu", Decimal())
    return cri.LinuxContainerResources(
        cpu_period=CPU_PERIOD if cpu else 0,
        cpu_quota=int(cpu * CPU_PERIOD),
        cpu_shares=max(2, int(requests.get("cpu", cpu) * 1024)),
        memory_limit_in_bytes=int(limits.get("memory", Decimal())),
    )


def _seccomp(pod: Object, container: Object) -> Any:
    given = container.get("seccompProfile") or pod.get("seccompProfile") or {"type": "Unconfined"}
    kind = cri.SecurityProfile.ProfileType.Value(given["type"])
    return cri.SecurityProfile(profile_type=kind)


def _namespaces(spec: Object) -> Any:
    pid = cri.POD if spec.get("shareProcessNamespace") else cri.CONTAINER
    return cri.NamespaceOption(network=cri.NODE if spec.get("hostNetwork") else cri.POD, pid=pid, ipc=cri.POD)


def _int64(value: int | None) -> Any:
    return None if value is None else cri.Int64Value(value=value)
