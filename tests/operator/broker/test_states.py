"""What pods say of their sandboxes: pods of a real cluster, as its API server gave them (Kubernetes 1.36)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_operator.broker.states import answer_of, image_of, user_of
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import merge

PODS = Path(__file__).parent / "pods"


def recorded(name: str) -> Object:
    found: Object = json.loads((PODS / f"{name}.json").read_text())
    return found


def pull(reason: str, message: str, image: str = "example.org/task:1") -> Object:
    """A pod whose main container waits for its image."""
    waiting = {"reason": reason, "message": message}
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{"name": "sandbox", "image": image, "state": {"waiting": waiting}}],
    }
    return {"metadata": {}, "status": status}


EXPECTED = {
    "unschedulable": ("Waiting", "no node has room for its pod: 0/1 nodes are available: 1 node(s) didn't match"),
    "no-room": ("Waiting", "no node has room for its pod: 0/1 nodes are available: 1 Insufficient cpu"),
    "initializing": ("Waiting", "its containers are being started"),
    "running": ("Running", ""),
    "no-such-image": ("Refused", "the node cannot have the image 127.0.0.1:15000/none/task:1 of container sandbox"),
    "private-image": ("Refused", "401 Unauthorized; a private registry needs imagePullSecrets"),
    "invalid-image": ("Refused", "the node cannot have the image Not So of container sandbox (InvalidImageName)"),
    "never-pulled": ("Refused", "(ErrImageNeverPull)"),
    "limited-registry": ("Waiting", "container sandbox: ImagePullBackOff: Back-off pulling image"),
    "broken-registry": ("Waiting", "503 Service Unavailable"),
    # Whatever an image is called, its registry did not answer.
    "forbidden-fruit": ("Waiting", "connection refused"),
    "root-refused": ("Refused", "the node cannot make container sandbox of localhost/busybox:1"),
    "out-of-memory": ("Ended", "container sandbox: OOMKilled, exit code 137"),
    "late": ("Ended", "DeadlineExceeded; Pod was active on the node longer than the specified deadline"),
    "init-failed": ("Ended", "container runtime: Error, exit code 3, no room"),
    "ended": ("Ended", "container sandbox: Completed, exit code 0"),
    "failed": ("Ended", "container sandbox: Error, exit code 4, the sandbox ends: a reason"),
    "no-program": ("Refused", 'exec: "/no/such": stat /no/such: no such file or directory'),
    "leaving": ("Ended", "its pod is being deleted"),
}


EVENTS = {
    "out-of-memory": "OOMKilled",
    "late": "DeadlineExceeded",
    "init-failed": "",
    "ended": "Completed",
    "failed": "Error",
    "no-program": "StartError",
    "leaving": "Deleted",
}
"""Kubernetes' own words for ends; of others there are none."""


def test_all_that_was_recorded_is_looked_at() -> None:
    assert {path.stem for path in PODS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pod_says_what_became_of_its_sandbox(name: str) -> None:
    pod = recorded(name)
    answer = answer_of(pod)
    state, words = EXPECTED[name]
    assert answer.state == state
    assert words in answer.reason
    assert (answer.address is None) == (state != "Running")
    assert answer.event == EVENTS.get(name, "")


def test_the_address_is_the_pods() -> None:
    pod = recorded("running")
    assert answer_of(pod).address == f"{pod['status']['podIP']}:8791"
    pod["status"]["podIP"] = "fd00::1"
    assert answer_of(pod).address == "[fd00::1]:8791"
    del pod["status"]["podIP"]
    assert answer_of(pod).reason == "its pod has no address yet"


def test_a_container_that_has_ended_is_no_container_that_starts() -> None:
    pod = recorded("out-of-memory")
    # The status of the container comes before the pod's phase.
    pod["status"]["phase"] = "Running"
    assert answer_of(pod).state == "Ended"
    assert "OOMKilled" in answer_of(pod).reason


def test_why_a_pod_is_deleted_by_others_is_said() -> None:
    pod = recorded("leaving")
    found = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting"}
    pod["status"]["conditions"].append(found)
    assert answer_of(pod).reason == "its pod is being deleted (PreemptionByScheduler: preempting)"
    assert answer_of(pod).event == "PreemptionByScheduler"


@pytest.mark.parametrize(
    ("message", "state"),
    [
        # Messages of containerd and CRI-O.
        ("failed to resolve reference: pull access denied, repository does not exist", "Refused"),
        ("reading manifest 1 in example.org/task: manifest unknown", "Refused"),
        ("no match for platform in manifest: not found", "Refused"),
        ("failed to authorize: failed to fetch anonymous token: 403 Forbidden", "Refused"),
        ("dial tcp: lookup example.org on 10.0.0.10:53: no such host", "Waiting"),
        ("context deadline exceeded", "Waiting"),
        ("toomanyrequests: You have reached your pull rate limit", "Waiting"),
        ('Back-off pulling image "example.org/task:1"', "Waiting"),
    ],
)
def test_a_registry_says_whether_it_is_worth_waiting(message: str, state: str) -> None:
    assert answer_of(pull("ErrImagePull", message)).state == state


@pytest.mark.parametrize("image", ["forbidden/not-found:unauthorized", "example.org/does not exist", "not-found"])
@pytest.mark.parametrize(
    "shape", ['Back-off pulling image "{}"', "{}: no such host", 'Head "https://{}": EOF', "x {} x"]
)
def test_words_in_an_images_name_say_nothing(image: str, shape: str) -> None:
    assert answer_of(pull("ImagePullBackOff", shape.format(image), image)).state == "Waiting"


def start_error(message: str, name: str = "sandbox") -> Object:
    """A pod of which a container could not be started."""
    pod = recorded("no-program")
    [container] = pod["status"]["containerStatuses"]
    container["state"]["terminated"]["message"] = message
    container["name"] = name
    return pod


@pytest.mark.parametrize(
    ("message", "state"),
    [
        # Messages of runc, after `failed to create containerd task: failed to create shim task: OCI runtime create`.
        ("error during container init: mkdir /etc/passwd: not a directory: unknown", "Refused"),
        ("runc create failed: Cwd must be an absolute path: unknown", "Refused"),
        ('error during container init: environment variable name can\'t be empty: "=x": unknown', "Refused"),
        ("exec /.kuberoll/ld: exec format error", "Refused"),
        ("context deadline exceeded: unknown", "Ended"),
        ("error during container init: write /proc/self/attr/keycreate: cannot allocate memory", "Ended"),
        ("mkdir /run/containerd/io.containerd.runtime.v2.task/k8s.io/1: no space left on device", "Ended"),
    ],
)
def test_what_could_not_be_started_and_never_will_is_no_loss(message: str, state: str) -> None:
    pod = start_error(message)
    assert answer_of(pod).state == state
    # The status of the container comes before the pod's phase.
    pod["status"]["phase"] = "Running"
    assert answer_of(pod).state == state


def test_what_could_not_be_started_beside_a_sandbox_is_not_its_end() -> None:
    assert answer_of(start_error("not a directory", "beside")).state == "Ended"


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("failed to create containerd container: mount callback failed on /tmpmounts/1: no users found", "Refused"),
        ("unable to find user nosuch: no matching entries in passwd file", "Refused"),
        ('failed to reserve container name "a": name "a" is reserved', "Waiting"),
        ("context deadline exceeded", "Waiting"),
    ],
)
def test_a_node_says_whether_a_container_can_ever_be_made(message: str, state: str) -> None:
    pod = recorded("root-refused")
    pod["status"]["containerStatuses"][0]["state"]["waiting"] = {"reason": "CreateContainerError", "message": message}
    answer = answer_of(pod)
    assert answer.state == state
    assert message in answer.reason


def test_what_is_told_of_the_image_is_read() -> None:
    pod = recorded("running")
    assert image_of(pod) == pod["status"]["containerStatuses"][0]["imageID"]
    assert image_of(recorded("initializing")) is None
    assert user_of(pod) is None

    def told(message: str, code: int = 0) -> Object:
        ended = {"terminated": {"exitCode": code, "message": message}}
        return {"metadata": {}, "status": {"initContainerStatuses": [{"name": "user", "state": ended}]}}

    assert user_of(told("1000:100\n")) == "1000:100"
    for message, code in (("", 0), ("root", 0), ("0:0; rm", 0), ("1000:100", 1), ("1:2:3", 0), ("٣:٣", 0)):
        assert user_of(told(message, code)) is None


_CONTAINER = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["sandbox", "runtime", "user"]),
        "image": st.text(max_size=5),
        "state": st.one_of(
            st.none(),
            st.just({}),
            st.fixed_dictionaries({"running": st.just({"startedAt": ""})}),
            st.fixed_dictionaries({"waiting": st.dictionaries(st.sampled_from(["reason", "message"]), st.text())}),
            st.fixed_dictionaries({"terminated": st.fixed_dictionaries({"exitCode": st.integers(0, 255)})}),
        ),
    },
)
_STATUS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
            "podIP": st.sampled_from(["10.0.0.1", "fd00::1"]),
            "conditions": st.none() | st.lists(st.just({"type": "PodScheduled", "status": "False"}), max_size=1),
            "containerStatuses": st.none() | st.lists(_CONTAINER, max_size=2),
            "initContainerStatuses": st.none() | st.lists(_CONTAINER, max_size=2),
        },
    ),
)


@given(_STATUS, st.booleans())
def test_every_status_has_an_answer_with_a_reason(status: Any, leaving: bool) -> None:
    answer = answer_of({"metadata": {"deletionTimestamp": "x"} if leaving else {}, "status": status})
    assert (answer.state == "Running") == (answer.address is not None)
    assert answer.state == "Running" or answer.reason
    assert len(answer.reason) <= 1000
    assert answer.state != "Running" or not leaving


def test_a_long_message_is_cut() -> None:
    pod = merge(recorded("failed"), {"status": {"message": "x" * 5000}})
    assert len(answer_of(pod).reason) == 1000
