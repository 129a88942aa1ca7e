"""What a sandbox's pod says of the sandbox. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kuberoll_api.sandboxes import CONTAINER, SANDBOX_PORT, SandboxAnswer
from kuberoll_operator.model import condition
from kuberoll_operator.sandbox_pod import IDENTITY_CONTAINER

# The kubelet tries again whatever the registry says; these answers will not change.
_NEVER: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_PULLS: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_NO_SUCH_IMAGE: Final = re.compile(
    r"not found|manifest unknown|does not exist|repository name not known|access denied|authorization failed|"
    r"unauthorized|forbidden|invalid reference|no match for platform",
    re.IGNORECASE,
)
# A container that its node cannot make, or could not start, for what its image or its pod says of it.
_UNMADE: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_NEVER_MADE: Final = re.compile(
    r"no users found|no groups found|unable to find (?:user|group)|no matching entries in|runAsNonRoot and image"
)
_NEVER_STARTED: Final = re.compile(
    r"not a directory|no such file or directory|not found in \$PATH|permission denied|exec format error|"
    r"argument list too long|must be an absolute path|environment variable name|too many levels of symbolic links"
)
# Names may consist of any words; messages have them in quotation marks, and without their registry, too.
_QUOTED: Final = re.compile(r'"[^"]*"')
_USER: Final = re.compile("[0-9]+:[0-9]+")
_CHARACTERS: Final = 1000


def answer_of(pod: Mapping[str, Any]) -> SandboxAnswer:
    """The state of a sandbox, by its pod as the API server has it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded"):
        return _ended(status)
    if metadata.get("deletionTimestamp"):
        words = f"its pod is being deleted{_disruption(status)}"
        return _answer("Ended", words, str(_disruption_target(status).get("reason") or "Deleted"))
    if (refused := _refusal(status)) is not None:
        return _answer("Refused", refused)
    for container in _containers(status, "containerStatuses"):
        if container.get("name") != CONTAINER:
            continue
        state = container.get("state") or {}
        if state.get("terminated"):
            # The pod's phase follows later.
            return _ended(status)
        if state.get("running"):
            if address := status.get("podIP"):
                host = f"[{address}]" if ":" in address else address
                return SandboxAnswer(state="Running", address=f"{host}:{SANDBOX_PORT}")
            return _answer("Waiting", "its pod has no address yet")
    return _answer("Waiting", _wait(status))


def image_of(pod: Mapping[str, Any]) -> str | None:
    """Which image a sandbox runs, as its node names it; None: it does not run yet."""
    for container in _containers(pod.get("status") or {}, "containerStatuses"):
        if container.get("name") == CONTAINER and (container.get("state") or {}).get("running"):
            return str(container.get("imageID") or "") or None
    return None


def user_of(pod: Mapping[str, Any]) -> str | None:
    """Whom the image's commands run as, `uid:gid`, if its pod has found that out."""
    for container in _containers(pod.get("status") or {}, "initContainerStatuses"):
        ended = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == IDENTITY_CONTAINER and ended.get("exitCode") == 0:
            said = str(ended.get("message") or "").strip()
            return said if _USER.fullmatch(said) else None
    return None


def waits_for_a_node(pod: Mapping[str, Any]) -> bool:
    """True if no node has room for a pod."""
    return condition(pod.get("status") or {}, "PodScheduled").get("status") == "False"


def _answer(state: Any, reason: str, event: str = "") -> SandboxAnswer:
    return SandboxAnswer(state=state, reason=reason[:_CHARACTERS], event=event[:_CHARACTERS])


def _ended(status: Mapping[str, Any]) -> SandboxAnswer:
    return _answer("Refused" if _never_started(status) else "Ended", _end(status), _event(status))


def _event(status: Mapping[str, Any]) -> str:
    """The word for a pod's end: its own, else that of a disruption, else its container's."""
    own = [
        str(((container.get("state") or {}).get("terminated") or {}).get("reason") or "")
        for container in _containers(status, "containerStatuses")
        if container.get("name") == CONTAINER
    ]
    return next(filter(None, (status.get("reason"), _disruption_target(status).get("reason"), *own)), "")


def _end(status: Mapping[str, Any]) -> str:
    said = [str(status[name]) for name in ("reason", "message") if status.get(name)]
    for container in _all(status):
        ended = (container.get("state") or {}).get("terminated") or {}
        if not ended or (ended.get("exitCode") == 0 and container.get("name") != CONTAINER):
            continue
        words = [f"container {container.get('name')}: {ended.get('reason') or 'ended'}"]
        words.append(f"exit code {ended.get('exitCode')}")
        # The last lines of its log; the policy's own programs do not write there.
        if message := str(ended.get("message") or "").strip():
            words.append(message)
        said.append(", ".join(words))
    return "; ".join(said) or "its pod has ended"


def _refusal(status: Mapping[str, Any]) -> str | None:
    for container in _all(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        image = str(container.get("image") or "")
        if reason in _NEVER or (reason in _PULLS and _is_missing(image, message)):
            return (
                f"the node cannot have the image {image} of container {container.get('name')} ({reason}): {message}; a "
                "private registry needs imagePullSecrets in sandbox.podTemplate"
            )
        if reason in _UNMADE and _NEVER_MADE.search(message):
            return f"the node cannot make container {container.get('name')} of {image} ({reason}): {message}"
    return None


def _never_started(status: Mapping[str, Any]) -> bool:
    """True if a sandbox never ran, and would not in another pod either."""
    for container in _all(status):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("reason") == "StartError" and _NEVER_STARTED.search(str(ended.get("message") or "")):
            # What is beside it is none of its business.
            return container.get("name") in (CONTAINER, IDENTITY_CONTAINER)
    return False


def _is_missing(image: str, message: str) -> bool:
    words = _QUOTED.sub("", message)
    for name in filter(None, (image, image.partition("/")[2], image.rpartition("/")[2])):
        words = words.replace(name, "")
    return _NO_SUCH_IMAGE.search(words) is not None


def _wait(status: Mapping[str, Any]) -> str:
    scheduled = condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"no node has room for its pod: {scheduled.get('message') or scheduled.get('reason') or ''}"
    if scheduled.get("status") != "True":
        return "its pod waits for the scheduler"
    for container in _all(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason and reason != "PodInitializing":
            message = str(waiting.get("message") or "")
            return ": ".join(filter(None, (f"container {container.get('name')}", reason, message)))
    return "its containers are being started"


def _disruption(status: Mapping[str, Any]) -> str:
    found = _disruption_target(status)
    return f" ({found.get('reason')}: {found.get('message')})" if found else ""


def _disruption_target(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kubernetes' condition of a pod that is taken away; empty if it is not."""
    found = condition(status, "DisruptionTarget")
    return found if found.get("status") == "True" else {}


def _all(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from _containers(status, "initContainerStatuses")
    yield from _containers(status, "containerStatuses")


def _containers(status: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    return status.get(name) or ()
