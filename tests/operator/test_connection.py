"""How the commands for people find their cluster, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import click
import pytest

from kuberoll_operator.console.connection import ClusterOptions, find_job, job_name, run
from kuberoll_operator.console.errors import ConsoleError, describe_error
from kuberoll_operator.kube.access import AccessError, default_namespace
from kuberoll_operator.kube.errors import error_of
from kuberoll_operator.kube.resources import PODS
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE, manifest


@pytest.mark.parametrize("text", ["first", "rlj/first", "RolloutJob/first", "rolloutjobs.kuberoll.io/first"])
def test_a_job_is_named_as_kubectl_does(text: str) -> None:
    assert job_name(text) == "first"


@pytest.mark.parametrize("text", ["pod/first", "rlj/", "a/b/first", ""])
def test_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write rlj/NAME"):
        job_name(text)


def kubeconfig(directory: Path) -> Path:
    file = directory / "config"
    contexts = [
        {"name": "plain", "context": {"cluster": "c", "user": "u"}},
        {"name": "team", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
    ]
    clusters = [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]
    users = [{"name": "u", "user": {"token": "t"}}]
    found = {"apiVersion": "v1", "kind": "Config", "contexts": contexts, "clusters": clusters, "users": users}
    file.write_text(json.dumps({**found, "current-context": "plain"}))
    return file


def test_the_namespace_is_the_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path)))
    assert default_namespace() == "default"
    assert default_namespace("team") == "team"
    assert ClusterOptions("named", "team").resolved_namespace() == "named"
    assert ClusterOptions(None, "team").resolved_namespace() == "team"
    with pytest.raises(AccessError, match="no context 'none'"):
        default_namespace("none")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(AccessError, match="set one with -n"):
        default_namespace()


async def test_a_job_that_is_not_there_is_named(tmp_path: Path) -> None:
    emulator = Emulator()
    emulator.put(manifest())
    async with emulator.connected(tmp_path) as connection:
        assert (await find_job(connection.client, NAMESPACE, "puzzle"))["kind"] == "RolloutJob"
        with pytest.raises(ConsoleError, match=f"no RolloutJob none in namespace {NAMESPACE}") as missing:
            await find_job(connection.client, NAMESPACE, "none")
        assert missing.value.code == 2


@pytest.mark.parametrize("allowed", [True, False])
async def test_rights_are_asked_for(allowed: bool, tmp_path: Path) -> None:
    emulator = Emulator()
    body = {"kind": "SelfSubjectAccessReview", "status": {"allowed": allowed}}
    emulator.faults.append(Fault(lambda request: "selfsubjectaccessreviews" in request.path, 201, body, times=None))
    async with emulator.connected(tmp_path) as connection:
        assert await connection.client.is_allowed("create", PODS, NAMESPACE, "exec") is allowed
    (asked,) = emulator.requests
    attributes = asked.body["spec"]["resourceAttributes"]
    expected = {"namespace": NAMESPACE, "verb": "create", "group": "", "resource": "pods", "subresource": "exec"}
    assert attributes == expected


async def test_an_api_server_that_does_not_say_lets_one_try(tmp_path: Path) -> None:
    emulator = Emulator()
    emulator.faults.append(Fault(lambda request: "selfsubjectaccessreviews" in request.path, 404, times=None))
    async with emulator.connected(tmp_path) as connection:
        assert await connection.client.is_allowed("create", PODS, NAMESPACE)


def test_refusals_in_words() -> None:
    message = (
        'rolloutjobs.kuberoll.io is forbidden: User "jane" cannot list resource "rolloutjobs" in API group '
        '"kuberoll.io" at the cluster scope'
    )
    refused = error_of(403, {"message": message, "reason": "Forbidden"}, "list /x")
    assert describe_error(refused).startswith(
        "missing permission: jane may not list rolloutjobs.kuberoll.io in all namespaces; "
        "docs/how-to/reading-output.md#rights"
    )
    denied = error_of(403, {"message": 'admission webhook "w" denied the request'}, "create /x")
    assert 'admission webhook "w" denied' in describe_error(denied)
    assert "log in" in describe_error(error_of(401, {"message": "Unauthorized"}, "get /x"))


def code_of(work: object) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(work)  # type: ignore[arg-type]
    return ended.value.code


def test_the_ends_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def give(code: int) -> int:
        return code

    async def refuse(error: Exception) -> int:
        raise error

    assert code_of(give(0)) == 0
    assert code_of(refuse(ConsoleError("nothing there"))) == 1
    assert code_of(refuse(AccessError("no kubeconfig"))) == 2
    assert code_of(refuse(error_of(403, {"message": "no"}, "x"))) == 2
    assert code_of(refuse(error_of(503, {"message": "away"}, "x"))) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["kuberoll: nothing there", "kuberoll: no kubeconfig"]
    assert all(line.startswith("kuberoll: ") for line in said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_what_is_to_be_removed(number: signal.Signals) -> None:
    removed: list[bool] = []

    async def work() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            removed.append(True)
        return 0

    before = signal.getsignal(number)
    try:
        assert code_of(work()) == 128 + number
    finally:
        signal.signal(number, before)
    assert removed == [True]
