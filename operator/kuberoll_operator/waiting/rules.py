"""What Kubernetes says about pods that wait, what it means for a job, and what to do about it.

Messages are those of Kubernetes 1.36, as tests/operator/waiting has them from a real control plane and kubelets. A rule
that matches nothing any more costs a remedy and not the words: what no rule knows is told as Kubernetes said it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kuberoll_api.conditions import Reason


class Rule(NamedTuple):
    """A cause of waiting.

    Attributes:
        cause: Its name.
        pattern: What is searched for in Kubernetes' message.
        reason: One of `conditions.Reason`.
        remedy: What to do; may name groups of the pattern in braces.
        words: What is said instead of Kubernetes' message; empty to say that.
        vague: True if any other rule that matched before says more.
    """

    cause: str
    pattern: re.Pattern[str]
    reason: str
    remedy: str
    words: str = ""
    vague: bool = False


class Explanation(NamedTuple):
    """Why something waits.

    Attributes:
        cause: Of the rule; empty if none matches.
        reason: One of `conditions.Reason`.
        message: Kubernetes' words or the rule's, and the remedy; not redacted.
        vague: True if anything else says more.
    """

    cause: str
    reason: str
    message: str
    vague: bool = False


def _rule(cause: str, pattern: str, reason: str, remedy: str = "", words: str = "", *, vague: bool = False) -> Rule:
    return Rule(cause, re.compile(pattern), reason, remedy, words, vague)


SCHEDULING: Final[Sequence[Rule]] = (
    _rule(
        "claim-missing",
        r'persistentvolumeclaim "(?P<claim>[^"]+)" not found',
        Reason.VOLUME,
        "create it, or correct the name",
        "PersistentVolumeClaim {claim} does not exist",
    ),
    _rule(
        "claim-deleted",
        r'persistentvolumeclaim "(?P<claim>[^"]+)" is being deleted',
        Reason.VOLUME,
        "it goes when no pod uses it any more; then create it again, or name another one",
        "PersistentVolumeClaim {claim} is being deleted",
    ),
    _rule(
        "claim-lost",
        r'persistentvolumeclaim "(?P<claim>[^"]+)" bound to non-existent persistentvolume "(?P<volume>[^"]+)"',
        Reason.VOLUME,
        "what was stored there is gone with it, unless its storage was retained; delete the claim and create it again",
        "PersistentVolumeClaim {claim} is bound to PersistentVolume {volume}, which does not exist any more",
    ),
    _rule(
        "claim-unbound",
        r"unbound immediate PersistentVolumeClaims",
        Reason.VOLUME,
        "`kubectl describe pvc` says why a claim has no volume",
    ),
    _rule(
        "claim-binding",
        r"running PreBind plugin \"VolumeBinding\"|binding volumes: ",
        Reason.STARTING,
        "the scheduler tries again",
    ),
    _rule(
        "no-volume-for-node",
        r"didn't find available persistent volumes to bind",
        Reason.VOLUME,
        "no PersistentVolume of the claim's class, size and access mode is free where a node fits; create one, or use "
        "a class that provisions",
    ),
    _rule(
        "storage-full",
        r"did not have enough free storage",
        Reason.VOLUME,
        "the storage that nodes which fit can reach is full; ask for less, or use another class",
    ),
    _rule(
        "devices",
        r"cannot allocate all claims",
        Reason.UNSCHEDULABLE,
        "no node has the devices that its resource claims ask for",
    ),
    _rule(
        "volume-elsewhere",
        r"volume node affinity conflict|didn't match PersistentVolume's node affinity|had no available volume zone",
        Reason.UNSCHEDULABLE,
        "its volume can only be reached from other nodes than those with room: of another zone, or one that is full; "
        "use a volume of that zone, shared storage or an object store",
    ),
    _rule(
        "volume-in-use-by-pod",
        r"ReadWriteOncePod access mode already in-use",
        Reason.VOLUME,
        "a claim of access mode ReadWriteOncePod takes one pod at a time; use ReadWriteMany, or an object store",
    ),
    _rule(
        "too-many-volumes",
        r"exceed max volume count",
        Reason.UNSCHEDULABLE,
        "the nodes have as many volumes attached as they can; use shared storage or an object store",
    ),
    _rule(
        "no-nodes",
        r"no nodes available to schedule pods",
        Reason.UNSCHEDULABLE,
        "the cluster has no node that is ready",
    ),
    _rule(
        "gpus",
        r"Insufficient (?P<resource>\S*(?:gpu|nvidia|amd\.com|habana|tpu|neuron)(?:[^\s,]*[^\s,.])?)",
        Reason.UNSCHEDULABLE,
        "wait until {resource} is free, ask for less (generation.gpusPerReplica, generation.replicas), or add nodes",
    ),
    _rule(
        "processors",
        r"Insufficient cpu",
        Reason.UNSCHEDULABLE,
        "wait, lower resources.requests.cpu of generation or workers, or add nodes",
    ),
    _rule(
        "memory",
        r"Insufficient memory",
        Reason.UNSCHEDULABLE,
        "wait, lower resources.requests.memory of generation or workers, or add nodes",
    ),
    _rule(
        "scratch",
        r"Insufficient ephemeral-storage",
        Reason.UNSCHEDULABLE,
        "wait, lower resources.requests.ephemeral-storage, or add nodes",
    ),
    _rule(
        "resource",
        r"Insufficient (?!cpu|memory|ephemeral-storage|\S*(?:gpu|nvidia|amd\.com|habana|tpu|neuron))"
        r"(?P<resource>[^\s,]*[^\s,.])",
        Reason.UNSCHEDULABLE,
        "no node has enough {resource}; correct its name, ask for less, or add nodes",
    ),
    _rule(
        "too-many-pods",
        r"Too many pods",
        Reason.UNSCHEDULABLE,
        "the nodes run as many pods as they may; add nodes",
    ),
    _rule(
        "taint",
        r"had untolerated taint",
        Reason.UNSCHEDULABLE,
        "`kubectl describe nodes` names the taints: a node that is not ready has one; others belong into `tolerations` "
        "in `podTemplate` of generation or workers",
    ),
    _rule(
        "selector",
        r"didn't match Pod's node affinity/selector",
        Reason.UNSCHEDULABLE,
        "correct `nodeSelector` (or the affinity in `podTemplate`) of generation or workers, or label a node",
    ),
    _rule("cordoned", r"were unschedulable", Reason.UNSCHEDULABLE, "`kubectl uncordon` takes a cordoned node back"),
    _rule(
        "anti-affinity",
        r"didn't (?:match|satisfy) pod (?:anti-)?affinity rules|didn't satisfy existing pods anti-affinity",
        Reason.UNSCHEDULABLE,
        "the pod (anti-)affinity in `podTemplate` leaves it no node",
    ),
    _rule(
        "spread",
        r"didn't match pod topology spread constraints",
        Reason.UNSCHEDULABLE,
        "topologySpreadConstraints in `podTemplate` leave it no node; ScheduleAnyway makes them a wish",
    ),
    _rule(
        "host-port",
        r"didn't have free ports for the requested pod ports",
        Reason.UNSCHEDULABLE,
        "a hostPort in `podTemplate` takes one pod a node",
    ),
    _rule(
        "gate",
        r"[Ss]cheduling is blocked due to non-empty scheduling gates",
        Reason.UNSCHEDULABLE,
        "whoever set spec.schedulingGates of the pod has to take them back",
    ),
)
"""Of the condition PodScheduled. The first that match give the reason and the remedies."""

CREATION: Final[Sequence[Rule]] = (
    _rule(
        "quota-unset",
        r"failed quota: (?P<quota>\S+?): must specify (?P<what>[\w.,/ -]+)",
        Reason.QUOTA,
        "set `resources` of generation or workers, or have a LimitRange give defaults",
    ),
    _rule("quota", r"exceeded quota", Reason.QUOTA, "raise the quota, ask for less, or wait"),
    _rule(
        "limit-range",
        r"(?:maximum|minimum) [\w.-]+ usage per \w+ is|[\w.-]+ max limit to request ratio per \w+ is",
        Reason.FORBIDDEN,
        "a LimitRange of the namespace allows other `resources`",
    ),
    _rule(
        "pod-security",
        r"violates PodSecurity",
        Reason.FORBIDDEN,
        "remove what it names from `podTemplate`, or run in a namespace that allows it",
    ),
    _rule(
        "service-account",
        r'error looking up service account \S+?/(?P<account>[^:\s]+): serviceaccount "[^"]+" not found',
        Reason.FORBIDDEN,
        "create it, or correct serviceAccountName",
        "ServiceAccount {account} does not exist",
    ),
    _rule(
        "priority-class",
        r"no PriorityClass with name (?P<name>\S+) was found",
        Reason.FORBIDDEN,
        "create it, or correct priorityClassName",
        "PriorityClass {name} does not exist",
    ),
    _rule(
        "runtime-class",
        r'(?:RuntimeClass|runtimeclass\S*) "(?P<name>[^"]+)" not found',
        Reason.FORBIDDEN,
        "create it, or correct runtimeClassName",
        "RuntimeClass {name} does not exist",
    ),
    _rule(
        "policy",
        r"ValidatingAdmissionPolicy '(?P<policy>[^']+)'.* denied request",
        Reason.FORBIDDEN,
        "do what the policy asks for, or have it make an exception",
    ),
    _rule(
        "webhook-denied",
        r'admission webhook "(?P<webhook>[^"]+)" denied the request',
        Reason.FORBIDDEN,
        "do what the webhook asks for, or have it make an exception",
    ),
    _rule(
        "webhook-down",
        r'failed calling webhook "(?P<webhook>[^"]+)"',
        Reason.FORBIDDEN,
        "webhook {webhook} of the cluster does not answer; pods are created when it does",
    ),
)
"""Of the API server's refusals of pods."""

STORAGE: Final[Sequence[Rule]] = (
    _rule(
        "multi-attach",
        r"Multi-Attach error",
        Reason.VOLUME,
        "a ReadWriteOnce volume is attached to one node at a time; use a ReadWriteMany claim or an object store for "
        "several workers, or wait until its pod on the other node has ended",
    ),
    _rule(
        "attach",
        r"AttachVolume\.Attach failed",
        Reason.VOLUME,
        "the log of the storage driver's controller has more",
    ),
    _rule(
        "secret-missing",
        r'for volume "(?P<volume>[^"]+)" : secret "(?P<name>[^"]+)" not found',
        Reason.POD_CONFIG,
        "create it, or correct the name",
        "volume {volume}: Secret {name} does not exist",
    ),
    _rule(
        "config-map-missing",
        r'for volume "(?P<volume>[^"]+)" : configmap "(?P<name>[^"]+)" not found',
        Reason.POD_CONFIG,
        "create it, or correct the name",
        "volume {volume}: ConfigMap {name} does not exist",
    ),
    _rule(
        "key-missing",
        r'for volume "(?P<volume>[^"]+)" : (?:configmap )?references non-existent (?:secret|config) key: (?P<key>\S+)',
        Reason.POD_CONFIG,
        "add it, or correct `items`",
        "volume {volume}: what it mounts has no key {key}",
    ),
    _rule(
        "host-path",
        r"hostPath type check failed: (?P<path>\S+)",
        Reason.POD_CONFIG,
        "the node has no such file or directory; correct the path, or choose nodes that have it",
    ),
    _rule(
        "token-projection",
        r"failed to fetch token|serviceaccounts? .* (?:not found|forbidden)",
        Reason.POD_CONFIG,
        "create the service account, or correct serviceAccountName",
    ),
    _rule(
        "driver-missing",
        r"driver name (?P<driver>\S+) not found in the list of registered CSI drivers",
        Reason.VOLUME,
        "the node has no plugin of {driver}; install it there, or choose other nodes",
    ),
    _rule("mount", r"MountVolume\.\w+ failed|MapVolume\.\w+ failed", Reason.VOLUME, ""),
    _rule(
        "mount-timeout",
        r"Unable to attach or mount volumes",
        Reason.VOLUME,
        "the events of the pod, its claims and the storage driver's log have the cause",
        vague=True,
    ),
)
"""Of the events FailedMount, FailedAttachVolume and FailedMapVolume of a pod."""

CLAIMED_DEVICES: Final[Sequence[Rule]] = (
    _rule(
        "device-claim",
        r'resourceclaim(?:template)?\.\S+ "(?P<name>[^"]+)" not found',
        Reason.POD_CONFIG,
        "create it, or correct resourceClaims in `podTemplate`",
    ),
)
"""Of the event FailedResourceClaimCreation of a pod."""

IMAGES: Final[Sequence[Rule]] = (
    _rule(
        "image-rate",
        r"429 Too Many Requests|toomanyrequests",
        Reason.IMAGE_PULL,
        "the registry limits pulls; use imagePullSecrets, or a registry of your own",
    ),
    _rule(
        "image-unauthorized",
        r"401 Unauthorized|403 Forbidden|authorization failed|pull access denied|no basic auth credentials|denied:",
        Reason.IMAGE_PULL,
        "name a Secret that may pull it in imagePullSecrets, or correct the image's name",
    ),
    _rule(
        "image-unknown",
        r": not found|manifest unknown|404 Not Found",
        Reason.IMAGE_PULL,
        "correct its name or tag, or push it",
    ),
    _rule(
        "image-architecture",
        r"no match for platform",
        Reason.IMAGE_PULL,
        "the image has no variant for the node's processors; build one, or choose other nodes by kubernetes.io/arch",
    ),
    _rule(
        "registry",
        r"no such host|connection refused|i/o timeout|server misbehaving|connection reset|context deadline exceeded"
        r"|tls: |x509: ",
        Reason.IMAGE_PULL,
        "the node does not reach the registry; correct its name, or look at the node's network and DNS",
    ),
    _rule(
        "image-name",
        r"couldn't parse image (?:name|reference)|invalid reference format",
        Reason.IMAGE_PULL,
        "correct it",
    ),
    _rule(
        "image-never",
        r"pull policy of Never",
        Reason.IMAGE_PULL,
        "load it onto the node, or set imagePullPolicy: IfNotPresent",
    ),
)
"""Of containers whose image is not there."""

_COMMAND: Final = _rule(
    "command",
    r"executable file not found|no such file or directory: unknown",
    Reason.POD_CONFIG,
    "the image has no such program; use an image of KubeRoll, or one built on it",
)

CONTAINERS: Final[Sequence[Rule]] = (
    _rule(
        "secret-of-variable",
        r'^secret "(?P<name>[^"]+)" not found',
        Reason.POD_CONFIG,
        "create it, or correct the name in `env` or `envFrom`",
        "Secret {name} does not exist",
    ),
    _rule(
        "config-map-of-variable",
        r'^configmap "(?P<name>[^"]+)" not found',
        Reason.POD_CONFIG,
        "create it, or correct the name in `env` or `envFrom`",
        "ConfigMap {name} does not exist",
    ),
    _rule(
        "key-of-variable",
        r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) \S+?/(?P<name>\S+)",
        Reason.POD_CONFIG,
        "add it, or correct the name in `env`",
        "{kind} {name} has no key {key}",
    ),
    _rule(
        "root",
        r"runAsNonRoot and image",
        Reason.POD_CONFIG,
        "set runAsUser in `podTemplate`, or use an image whose user is a number other than 0",
    ),
    _rule("sub-path", r"subPath", Reason.POD_CONFIG, "the volume has no such path and cannot be given one; correct it"),
    _COMMAND,
    _rule(
        "seccomp", r"cannot load seccomp profile", Reason.POD_CONFIG, "the node has no such profile; install it there"
    ),
    _rule("hook", r"lifecycle hook|PostStartHook", Reason.POD_CONFIG, "correct the hook in `podTemplate`"),
)
"""Of containers that are not started, and of the events about their hooks."""

EXITS: Final[Sequence[Rule]] = (
    _COMMAND,
    _rule(
        "architecture",
        r"exec format error",
        Reason.CRASHING,
        "the image is for other processors than the node's; build it for them, or choose nodes by kubernetes.io/arch",
    ),
)
"""Of containers that have exited, whose own message names no remedy."""

SANDBOX: Final[Sequence[Rule]] = (
    _rule(
        "runtime-handler",
        r"no runtime for \"(?P<handler>[^\"]+)\" is configured|RuntimeHandler \"(?P<other>[^\"]+)\" not supported",
        Reason.POD_SANDBOX,
        "the node's container runtime lacks what runtimeClassName asks for; choose nodes that have it",
    ),
    _rule(
        "network",
        r"network is not ready|failed to (?:setup|set up|find|load) (?:network|CNI|plugin)|cni|CNI",
        Reason.POD_SANDBOX,
        "the node's network plugin does not work; cordon the node, or repair it",
    ),
    _rule(
        "user-namespaces",
        r"runtime does not support user namespaces",
        Reason.POD_SANDBOX,
        "remove hostUsers: false from `podTemplate`, or choose nodes whose container runtime can",
    ),
    _rule("sandbox", r"", Reason.POD_SANDBOX, "the node's container runtime cannot start pods"),
)
"""Of the events FailedCreatePodSandBox and NetworkNotReady of a pod."""

CLAIMS: Final[Sequence[Rule]] = (
    _rule(
        "class-missing",
        r'storageclass\.storage\.k8s\.io "(?P<name>[^"]+)" not found',
        Reason.VOLUME,
        "create it, or correct storageClassName",
        "StorageClass {name} does not exist",
    ),
    _rule(
        "no-class",
        r"no persistent volumes available for this claim and no storage class is set",
        Reason.VOLUME,
        "set storageClassName; the cluster has no default class",
    ),
    _rule(
        "access-mode-of-class",
        r"(?i)(?:access ?modes?|MULTI_NODE\w*|ReadWriteMany|RWX).*(?:not supported|unsupported|invalid|not allowed)"
        r"|(?:not supported|unsupported|only|invalid).*(?:access ?modes?|MULTI_NODE|ReadWriteMany|RWX)",
        Reason.VOLUME,
        "the class does not offer this access mode; for ReadWriteMany use one of shared storage, or an object store",
    ),
    _rule(
        "access-mode-of-volume",
        r"incompatible accessMode",
        Reason.VOLUME,
        "the volume that the claim names does not offer its access mode; correct one of them",
    ),
    _rule("provisioning", r"failed to provision volume", Reason.VOLUME, "the provisioner's words; its log has more"),
    _rule(
        "no-volume",
        r"no persistent volumes available|no volume plugin matched name: kubernetes\.io/no-provisioner",
        Reason.VOLUME,
        "create a PersistentVolume that fits, or use a class that provisions",
    ),
)
"""Of the warnings about a PersistentVolumeClaim."""

REMOVAL: Final[Sequence[Rule]] = (
    _rule(
        "preempted",
        r"PreemptionByScheduler|preempting to accommodate",
        Reason.POD_REMOVED,
        "a pod of higher priority took its place; a priorityClassName of generation or workers guards against it",
    ),
    _rule(
        "node-gone",
        r"DeletionByTaintManager|deletion due to (?:NoExecute|toleration)",
        Reason.POD_REMOVED,
        "its node was taken for lost, or tainted",
    ),
    _rule("node-deleted", r"DeletionByPodGC", Reason.POD_REMOVED, "its node does not exist any more"),
    _rule("drained", r"EvictionByEvictionAPI", Reason.POD_REMOVED, "its node is being drained"),
    _rule(
        "node-full",
        r"[Tt]he node was low on resource: (?P<resource>[\w-]+)",
        Reason.POD_REMOVED,
        "its node ran out of {resource}; set requests and limits to what it uses",
    ),
    _rule(
        "scratch-full",
        r"(?:exceeds the limit|exceeds the total limit of containers|local ephemeral storage usage exceeds)",
        Reason.POD_REMOVED,
        "it wrote more to local disk than its limit; raise ephemeral-storage, or sizeLimit of the volume",
    ),
    _rule(
        "sysctl",
        r"SysctlForbidden",
        Reason.POD_REMOVED,
        "nodes allow it with --allowed-unsafe-sysctls; or remove it from `podTemplate`",
    ),
    _rule(
        "node-label",
        r"NodeAffinity: ",
        Reason.POD_REMOVED,
        "the node's labels are not those that it asks for any more, or nodeName was set",
    ),
    _rule(
        "node-refused",
        r"OutOf\w+: |UnexpectedAdmissionError|Pod was rejected",
        Reason.POD_REMOVED,
        "the node did not take it: others had what it needs; another one is made",
    ),
    _rule("terminated-by-kubelet", r"TerminationByKubelet", Reason.POD_REMOVED, "its node shuts down, or needs room"),
)
"""Of pods that the cluster has removed: their condition DisruptionTarget, or the reason and message of their status."""

TABLES: Final = {
    "scheduling": SCHEDULING,
    "creation": CREATION,
    "storage": STORAGE,
    "devices": CLAIMED_DEVICES,
    "images": IMAGES,
    "containers": CONTAINERS,
    "exits": EXITS,
    "sandbox": SANDBOX,
    "claims": CLAIMS,
    "removal": REMOVAL,
}

_PULL: Final = re.compile(
    r'(?:rpc error: code = \w+ desc = )?failed to pull and unpack image "(?P<image>[^"]+)": '
    r'(?:failed to resolve reference "[^"]+": )?'
)
_RUN: Final = re.compile(
    r"failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    r"unable to start container process: "
)


def shorten(text: str) -> str:
    """A message of a container runtime without the names of the layers that it came through."""
    return _RUN.sub("", _PULL.sub(r"image \g<image>: ", text))


def explain(text: str, rules: Iterable[Rule], *, otherwise: str, remedies: int = 1) -> Explanation:
    """What a message of Kubernetes means.

    Args:
        otherwise: Reason if no rule matches.
        remedies: Greatest number of matching rules whose remedies are told.
    """
    matches = [(rule, match) for rule in rules if (match := rule.pattern.search(text)) is not None]
    if not matches:
        return Explanation("", otherwise, text)
    (first, match), *_ = matches
    said = first.words.format(**_groups(match)) if first.words else text
    told = dict.fromkeys(rule.remedy.format(**_groups(found)) for rule, found in matches[:remedies] if rule.remedy)
    return Explanation(first.cause, first.reason, "; ".join([said.rstrip("."), *told]), first.vague)


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {name: value or "" for name, value in match.groupdict().items()}
