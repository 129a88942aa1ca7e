"""`kuberoll get` against a real API server: a reader pod, commands in it, rights, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ruamel.yaml import YAML

from kuberoll_operator import names
from kuberoll_operator.commands.get import rendered_template
from kuberoll_operator.console.connection import Connection, find_job
from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.reader_pod import COMPONENT
from kuberoll_operator.console.reader_session import ReaderSession
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from tests.cluster.api import Api, Object
from tests.cluster.control_plane import ApiServer, kubeconfig
from tests.cluster.jobs import read_output, rollout_job
from tests.cluster.kubelet import Kubelet
from tests.cluster.operator_process import token_of
from tests.cluster.streaming import ExecServer, running_exec_server
from tests.cluster.test_lifecycle import Cluster, check_complete, cluster, complete, failed, installed

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "reading-output.md"
READER = f"{names.COMPONENT_LABEL}={COMPONENT}"


@pytest.fixture(scope="module")
def exec_server(control_plane: ApiServer, kubelet: Kubelet) -> Iterator[ExecServer]:
    with running_exec_server(control_plane, kubelet) as server:
        yield server


class Person:
    """Somebody with a kubeconfig, who runs the command."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.file, self.directory = file, directory

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from kuberoll_api.cli import main; main()", *arguments),
            cwd=self.directory,
            env={**os.environ, "KUBECONFIG": str(self.file)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> tuple[int | None, bytes, str]:
        process = await self.start(*arguments)
        out, error = await process.communicate()
        return process.returncode, out, error.decode()


async def person(api: Api, server: ApiServer, namespace: str, directory: Path, rules: list[Object]) -> Person:
    """A user with these rights in a namespace."""
    name, meta = f"user-{len(rules)}", {"namespace": namespace}
    group = "rbac.authorization.k8s.io"
    await api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "name": name}})
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {**meta, "name": name}, "rules": rules}
    context = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {**meta, "name": name},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [context],
    }
    await api.apply(role)
    await api.apply(binding)
    file = directory / f"{name}.kubeconfig"
    token = await token_of(api, namespace, name)
    file.write_text(json.dumps(kubeconfig(server.url, token, server.authority, namespace)))
    return Person(file, directory)


def documented_rules() -> list[Object]:
    """The rights that docs/how-to/reading-output.md says the commands need."""
    text = PAGE.read_text().split("```yaml\n", 1)[1].split("```", 1)[0]
    found: list[Object] = json.loads(json.dumps(YAML(typ="safe").load(text)["rules"]))
    return found


@pytest_asyncio.fixture
async def reader(
    api: Api, control_plane: ApiServer, exec_server: ExecServer, cluster: Cluster, tmp_path: Path
) -> AsyncIterator[Person]:
    """Somebody with the documented rights, in a namespace that enforces the strictest Pod Security."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await api.patch("Namespace", None, cluster.namespace, {"metadata": {"labels": labels}})
    yield await person(api, control_plane, cluster.namespace, tmp_path, documented_rules())
    assert await readers_of(cluster) == [], "a reader pod is left"


async def readers_of(cluster: Cluster) -> list[str]:
    pods = await cluster.api.list("Pod", cluster.namespace, labels=READER)
    return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def copied(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_file() and not path.name.startswith("."))


async def test_the_output_of_a_job_while_it_runs_and_after(cluster: Cluster, reader: Person) -> None:
    cluster.operator(progress_seconds=0.5)
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5, rollout={"concurrency": 1}))
    await cluster.stored(2)
    code, _, said = await reader.run("get", "rlj/puzzles")
    assert code == 0, said
    assert "rlj/puzzles is Running: this is a snapshot" in said
    here, there = reader.directory / "puzzles", cluster.output()
    shards = [path for path in sorted(here.iterdir()) if path.name.startswith("shard-")]
    assert shards
    for shard in shards:
        text = shard.read_bytes()
        assert text.endswith(b"\n")
        assert (there / shard.name).read_bytes().startswith(text)

    check_complete(cluster, await cluster.job(complete))
    code, out, said = await reader.run("get", "puzzles", "-n", cluster.namespace, "--output", "puzzles")
    assert code == 0, said
    assert "snapshot" not in said
    assert "puzzles/report.html" in out.decode().split()
    assert copied(here) == copied(there)
    for name in copied(there):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    assert len(read_output(here)) == 16

    code, out, said = await reader.run("get", "rlj/puzzles", "--stream")
    assert code == 0, said
    assert sorted(out.splitlines()) == sorted(
        line for path in there.glob("shard-*.jsonl") for line in path.read_bytes().splitlines()
    )


async def test_the_output_of_a_job_that_failed(cluster: Cluster, reader: Person) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5, rollout={"concurrency": 1}))
    await cluster.stored(2)
    await cluster.patch({"activeDeadlineSeconds": 1})
    await cluster.job(failed)
    code, _, said = await reader.run("get", "rlj/puzzles", "--output", "after")
    assert code == 0, said
    assert "snapshot" not in said
    assert copied(reader.directory / "after") == copied(cluster.output())


async def _large(cluster: Cluster, size: int) -> Path:
    """A job that has ended, with a file of so many bytes in its output."""
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, count=1, repeats=1, shards=1, replicas=1))
    await cluster.job(complete)
    path = cluster.output() / "large.parquet"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    return path


async def test_an_interrupted_copy_removes_its_pod_and_is_gone_on_with(
    cluster: Cluster, reader: Person, exec_server: ExecServer
) -> None:
    large = await _large(cluster, 64 << 20)
    partial = reader.directory / "puzzles" / "large.parquet.partial"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = await reader.start("get", "rlj/puzzles")
        before = partial.stat().st_size if partial.exists() else 0
        for _ in range(100_000):
            if process.returncode is not None or (partial.exists() and partial.stat().st_size > before):
                break
            await asyncio.sleep(0.005)
        process.send_signal(number)
        _, error = await process.communicate()
        assert process.returncode == 128 + number, error.decode()
        assert "interrupted: everything copied so far is kept" in error.decode()
        assert await readers_of(cluster) == []
        assert 0 < partial.stat().st_size < large.stat().st_size
    # And over connections that are cut on the way.
    exec_server.cut_after = [1 << 20, 10 << 20]
    code, _, said = await reader.run("get", "rlj/puzzles")
    assert code == 0, said
    assert "connection lost" in said
    assert (reader.directory / "puzzles" / "large.parquet").read_bytes() == large.read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize("verb", ["create", "delete"])
async def test_a_missing_right_is_named_before_anything_is_done(
    verb: str, cluster: Cluster, reader: Person, control_plane: ApiServer
) -> None:
    await cluster.create(rollout_job(cluster.namespace))
    rules: list[Any] = documented_rules()
    for rule in rules:
        if "pods" in rule["resources"] or "pods/exec" in rule["resources"]:
            rule["verbs"] = [item for item in rule["verbs"] if item != verb]
    less = await person(cluster.api, control_plane, cluster.namespace, reader.directory, [*rules, rules[0]])
    code, _, said = await less.run("get", "rlj/puzzles")
    assert code == 2
    assert f"missing permission: you may not {verb} pods" in said
    assert (f"{verb} pods/exec" in said) == (verb == "create")
    assert "docs/how-to/reading-output.md#rights" in said
    assert await readers_of(cluster) == []
    nobody = await person(cluster.api, control_plane, cluster.namespace, reader.directory, [])
    code, _, said = await nobody.run("get", "rlj/puzzles")
    assert code == 2
    assert "may not get rolloutjobs.kuberoll.io in namespace " + cluster.namespace in said
    code, _, said = await less.run("get", "rlj/none")
    assert code == 2
    assert f"there is no RolloutJob none in namespace {cluster.namespace}" in said


async def test_a_pod_that_cannot_start_says_why_and_is_removed(cluster: Cluster, reader: Person) -> None:
    await cluster.create(rollout_job(cluster.namespace, workers={"image": "missing/worker:1"}))
    access = await load_access(reader.file)
    async with Client(access) as client:
        live = await find_job(client, cluster.namespace, "puzzles")
        session = ReaderSession(
            Connection(access, client),
            live,
            fallback_template=lambda: rendered_template(live),
            note=lambda _: None,
            start_seconds=5,
        )
        with pytest.raises(ConsoleError, match=r"did not start within 5 s: ImagePullError.*missing/worker:1") as failed:
            async with session, session.connect():
                pass
    assert failed.value.code == 1
