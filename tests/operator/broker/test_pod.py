"""The pod that is a sandbox: what it looks like, `python -m tests.operator.broker.test_pod --update-golden`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kuberoll_api.sandboxes import CAPABILITIES, Placement
from kuberoll_operator.commands.render import to_yaml
from kuberoll_operator.model import Object
from kuberoll_operator.sandbox_pod import build_pod, pod_name, problem
from tests.operator.broker.support import context, request
from tests.schemas import validate

GOLDEN = Path(__file__).parent / "golden"
PLACEMENT = Placement(
    node_selector={"pool": "spot"}, tolerations=[{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
)
POOL: dict[str, Any] = {"resources": {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "minimal": ({}, {}, None),
    "known-user": ({}, {}, "1000:1000"),
    "own-user": ({"identify": []}, {}, None),
    "everything": (
        {
            "cpus": 1.5,
            "memory": 2 << 30,
            "storage": (1 << 30) + 1,
            "network": "All",
            "read_only": True,
            "placement": PLACEMENT,
            "lease_seconds": 90,
            "start_seconds": 300,
            "total_seconds": 3600,
            "variables": {"KUBEROLL_SANDBOX": '{"environment":{"PRICE":"$$5","HOST":"$(HOSTNAME)"}}'},
        },
        POOL,
        None,
    ),
}


def made(case: str) -> Object:
    wanted, sandbox, user = CASES[case]
    return build_pod("sb-1", request(**wanted), context(**sandbox), user=user)


@pytest.mark.parametrize("case", CASES)
def test_pods_are_as_they_were(case: str) -> None:
    assert to_yaml(made(case)) == (GOLDEN / f"{case}.yaml").read_text()
    validate(made(case))


def test_one_that_starts_on_a_lost_node_is_given_up_soon_unless_the_job_says_otherwise() -> None:
    keys = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    own = {"key": keys[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}
    for said, seconds in (([], [15, 15]), ([own], [600, 15]), ([{"operator": "Exists"}], [None])):
        spec = build_pod("sb", request(placement={"tolerations": said}), context())["spec"]
        assert [item.get("tolerationSeconds") for item in spec["tolerations"]] == seconds


@pytest.mark.parametrize(("cpus", "wanted", "limit"), [(None, "50m", None), (0.02, "20m", "20m"), (4, "50m", "4000m")])
def test_what_runs_before_a_sandbox_is_limited_where_that_is(
    cpus: float | None, wanted: str, limit: str | None
) -> None:
    # A quota of `limits.cpu` admits no pod of which a container has none.
    for container in build_pod("sb", request(cpus=cpus), context())["spec"]["initContainers"]:
        assert container["resources"]["requests"]["cpu"] == wanted
        assert container["resources"]["limits"].get("cpu") == limit


def test_there_is_no_golden_pod_of_nothing() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


def _expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it: `$(NAME)` is a variable if there is one, `$$` is `$`, and all else stays as it is."""
    found, place = "", 0
    while place < len(text):
        if text[place] != "$" or place + 1 == len(text):
            found, place = found + text[place], place + 1
        elif text[place + 1] == "$":
            found, place = found + "$", place + 2
        elif text[place + 1] == "(" and ")" in text[place + 2 :]:
            end = text.index(")", place + 2)
            name = text[place + 2 : end]
            found, place = found + variables.get(name, f"$({name})"), end + 1
        else:
            found, place = found + text[place : place + 2], place + 2
    return found


def test_texts_that_were_seen_on_a_cluster() -> None:
    """What a container of a real cluster was given, for what stood in its pod."""
    for text, given_ in {"a$$b$$(X) $c $": "a$b$(X) $c $", "a$$$$b$$(X) $$c $$": "a$$b$(X) $c $", "x$": "x$"}.items():
        assert _expanded(text, {"X": "1"}) == given_


@given(st.text("$()AX b", max_size=12))
def test_texts_arrive_as_they_are(text: str) -> None:
    wanted = request(command=["sh", text], variables={"X": text, "A": "1"}, identify=["sh", text])
    pod = build_pod("sb-1", wanted, context())
    [main], identity = pod["spec"]["containers"], pod["spec"]["initContainers"][1]
    variables = {"A": "1", "X": "2", "AX": "3"}
    assert {item["name"]: _expanded(item["value"], variables) for item in main["env"]} == {"A": "1", "X": text}
    assert [_expanded(word, variables) for word in main["command"]] == ["sh", text]
    assert [_expanded(word, variables) for word in identity["command"]] == ["sh", text]


def test_what_the_job_says_and_what_it_must_not_touch() -> None:
    pod = made("everything")
    [main] = pod["spec"]["containers"]
    assert set(main["securityContext"]["capabilities"]["add"]) == set(CAPABILITIES)
    assert not {"NET_RAW", "MKNOD", "SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN"} & set(CAPABILITIES)
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["metadata"]["ownerReferences"][0]["controller"] is True
    # More than the request's limit is not reserved.
    small = build_pod("sb-1", request(memory=64 << 20, cpus=0.1), context(**POOL))["spec"]["containers"][0]["resources"]
    assert small == {"limits": {"cpu": "100m", "memory": "64Mi"}}


@pytest.mark.parametrize(
    ("wanted", "sandbox", "words"),
    [
        ({"environment": "none"}, {}, "no environment none"),
        ({"environment": "puzzles"}, {}, "no environment puzzles with a sandbox"),
        ({"network": "All"}, {"network": {"mode": "None"}}, "sandbox.network.mode"),
        ({"network": "All"}, {"network": None}, "sandbox.network.mode"),
        ({"network": "All"}, {"network": {"mode": "Allowlist", "allowedHosts": ["a.org"]}}, "sandbox.network.mode"),
        ({"memory": (4 << 30) + 100}, POOL, "allows 4Gi of memory"),
        ({"memory": None}, POOL, "allows 4Gi of memory"),
        ({"cpus": 3}, {"resources": {"limits": {"cpu": "2500m"}}}, "allows 2500m of cpu"),
        ({"storage": 2 << 30}, {"resources": {"limits": {"ephemeral-storage": "1Gi"}}}, "1Gi of ephemeral-storage"),
        ({"total_seconds": 61}, {"totalSeconds": 60}, "allows 60 s"),
    ],
)
def test_more_than_the_job_allows_is_refused(wanted: dict[str, Any], sandbox: dict[str, Any], words: str) -> None:
    assert words in (problem(request(**wanted), context(**sandbox)) or "")


def test_what_the_job_allows_is_not_refused() -> None:
    assert problem(request(memory=4 << 30, network="All", total_seconds=86_400), context(**POOL)) is None
    assert problem(request(cpus=2.5), context(resources={"limits": {"cpu": "2500m"}})) is None
    assert problem(request(), context(network={"mode": "None"})) is None


@pytest.mark.parametrize(
    "wanted",
    [
        {"worker": "A"},
        {"worker": "a" * 64},
        {"worker": "-a"},
        {"worker": "a/b"},
        {"command": []},
        {"cpus": 0},
        {"cpus": float("nan")},
        {"memory": -1},
        {"memory": 1 << 60},
        {"storage": 0},
        {"image": ""},
        {"image": "x" * 2000},
        {"network": "Host"},
        {"lease_seconds": float("inf")},
        {"total_seconds": 1e9},
        {"variables": {"A": "ü" * 65_001}},
        {"command": ["x" * 130_001]},
        {"variables": {str(number): "" for number in range(65)}},
    ],
)
def test_nonsense_is_no_request(wanted: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request(**wanted)


def test_names_of_pods_are_names_of_their_job() -> None:
    assert pod_name("tasks", "sb-1") == "tasks-sb-1"


def _update() -> None:
    for case in CASES:
        (GOLDEN / f"{case}.yaml").write_text(to_yaml(made(case)))


if __name__ == "__main__":
    if sys.argv[1:] != ["--update-golden"]:
        sys.exit("usage: python -m tests.operator.broker.test_pod --update-golden")
    _update()
