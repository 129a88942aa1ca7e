"""Servers of environments and services in containers, as their rendered pods say, beside the job that asks them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kuberoll_api import contract
from kuberoll_api.manifest.beside import files_beside
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.console.shipping import files_config_map, with_files
from kuberoll_workers.environments.builtin.calculator import CalculatorEnvironment
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.environments.remote import protocol
from tests.classifier import ENGINE_ARGS, VARIABLES, logits, make_classifier
from tests.cluster.jobs import contents, read_output, stored_lines
from tests.containers.images import ROOT, name_of
from tests.containers.node import ContainerNode, is_ready, pod_of
from tests.containers.runtime import ContainerPod
from tests.containers.test_pods import (
    ENGINE_SECONDS,
    MODEL,
    NAMESPACE,
    SECONDS,
    check,
    children,
    identity,
    play,
)

Object = dict[str, Any]

# Images are built before, in fixtures.
pytestmark = pytest.mark.timeout(900, func_only=True)

ANSWERS = [
    *(f"<action>{way}</action>" for way in ("up", "down", "left", "right")),
    *("<call>3 + 5</call>", "<answer>16</answer>"),
]
ROWS = 16
REPEATS = 4

SPY = {
    "spying.py": """
import os
import socket
from pathlib import Path

from kuberoll_workers.environments import EnvironmentReturn
from secrets_of import places


class Spy:
    '''Rewards a word by its length; `strict`: a step fails where its process has more than an environment may have.'''

    def __init__(self, config):
        self.strict = config["strict"]

    def step(self, message_log_batch, metadata):
        if self.strict:
            self.look()
        count = len(message_log_batch)
        rewards = [float(len(log[-1]["content"])) for log in message_log_batch]
        observations = [{"role": "environment", "content": "."}] * count
        return EnvironmentReturn(observations, metadata, [None] * count, rewards, [True] * count)

    def look(self):
        assert os.getuid() == 65532
        named = [name for name in os.environ if "TOKEN" in name or "KEY" in name]
        # A Ray that it starts has a token of its own.
        assert named == ["RAY_AUTH_TOKEN"], named
        assert not os.environ["RAY_AUTH_TOKEN"].startswith("secret-")
        for path in places.CLOSED:
            try:
                found = Path(path).read_bytes()
            except OSError:
                continue
            raise AssertionError(f"an environment's process can read {path}: {found[:80]}")
        for folder in ("/", "/etc", "/opt/kuberoll-files", "/home/kuberoll"):
            try:
                Path(folder, "written").write_text("")
            except OSError:
                continue
            raise AssertionError(f"an environment's process can write to {folder}")

    def global_post_process_and_metrics(self, batch):
        return batch, {"user": os.getuid(), "host": socket.gethostname() if self.strict else ""}
""",
    "secrets_of/__init__.py": "",
    "secrets_of/places.py": """
CLOSED = [
    "/proc/1/environ",
    "/etc/kuberoll/job.json",
    "/etc/kuberoll-environment/environment.json",
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
]
""",
}
"""An environment beside the manifest that looks around."""


def generation(responses: Sequence[str], seconds: float) -> Object:
    """`spec.generation` with the tests' engine without Ray, in the default worker image.

    Args:
        seconds: That a response takes.
    """
    # Its pod alone has the tests' modules.
    engine = {
        "name": "generation",
        "image": name_of("worker"),
        "command": ["python", "-m", "tests.cluster.engine_pod", "--config", "/etc/kuberoll/job.json"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONPATH", "value": "/opt/kuberoll-tests"},
        ],
        "volumeMounts": [{"name": "tests", "mountPath": "/opt/kuberoll-tests/tests", "readOnly": True}],
    }
    volumes = [{"name": "tests", "hostPath": {"path": str(ROOT / "tests")}}]
    return {
        "backend": "Native",
        "model": {"source": MODEL},
        "engine": "Simulated",
        "simulated": {"responses": list(responses), "firstTokenSeconds": seconds},
        "engineArgs": {"max_model_len": 512},
        "sampling": {"seed": 7},
        "podTemplate": {"spec": {"containers": [engine], "volumes": volumes}},
    }


def job_of(name: str, **spec: Any) -> RolloutJob:
    head = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob"}
    workers = {"replicas": 1, "resources": {"limits": {"memory": "2Gi"}}}
    fields = {"workers": workers, "output": {"uri": f"pvc://store/{name}"}, **spec}
    return RolloutJob.model_validate({**head, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": fields})


def job(name: str, isolation: str, seconds: float) -> RolloutJob:
    """Three environments, one of them beside the manifest; a response takes so many seconds."""
    shared = {"isolation": isolation, "stepTimeoutSeconds": 120}
    return job_of(
        name,
        generation=generation(ANSWERS, seconds),
        environments=[
            {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 6}, **shared},
            {"name": "sums", "type": "calculator", "config": {"maxCalls": 3}, "processes": 2, **shared},
            {"name": "spy", "entrypoint": "spying:Spy", "config": {"strict": isolation == "Remote"}, **shared},
        ],
        dataset={"source": {"uri": "rows/all.jsonl"}, "repeats": REPEATS},
        rollout={"concurrency": 8},
    )


def rows(made: RolloutJob) -> Iterator[Object]:
    """Rows of all environments, in turns."""
    puzzle, sums, _ = made.spec.environments
    makers: Object = {"puzzle": SlidingPuzzleEnvironment(puzzle.config), "sums": CalculatorEnvironment(sums.config)}
    found = {name: iter(maker.generate_dataset(ROWS, seed=0)) for name, maker in makers.items()}
    found["spy"] = iter([{"prompt": f"Say word {number}.\n"} for number in range(ROWS)])
    names = list(found)
    for index in range(ROWS):
        name = names[index % len(names)]
        yield {"task_name": name, **next(found[name]), "idx": index}


async def shipped(node: ContainerNode, made: RolloutJob, directory: Path) -> RolloutJob:
    """The job with the files that `kuberoll apply` would ship, which are on the node then."""
    texts = {**SPY, "rows/all.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows(made))}
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    files = {name: path.read_bytes() for name, path in files_beside(made, directory).files.items()}
    assert set(files) == set(texts)
    await node.put(files_config_map(made.metadata.name, NAMESPACE, files))
    return with_files(made, files)


async def with_tokens(node: ContainerNode, parts: dict[str, Object]) -> dict[str, str]:
    """Gives all Secrets of a job values that differ; by `Kind/name` and key."""
    found: dict[str, str] = {}
    for name, child in parts.items():
        if child["kind"] == "Secret":
            values = {key: f"secret-{name}-{key}" for key in child["stringData"]}
            found |= {f"{name.rpartition('-')[0]}/{key}": value for key, value in values.items()}
            await node.put({**child, "stringData": values})
    return found


async def started(node: ContainerNode, parts: dict[str, Object], part: str, name: str) -> ContainerPod:
    """A Deployment's pod that is ready, by its own probes, without having been started twice."""
    home = node.run(pod_of(parts[part], name))
    ready = await node.until(name, is_ready, ENGINE_SECONDS)
    assert ready["status"]["containerStatuses"][0]["restartCount"] == 0, node.log(name)
    return home


async def stored(node: ContainerNode, made: RolloutJob, more_than: int) -> None:
    """Returns when more than so many trajectories of a job are stored."""
    output = node.claim(NAMESPACE, "store") / made.metadata.name
    async with asyncio.timeout(ENGINE_SECONDS):
        while True:
            if len(stored_lines(output)) > more_than:
                return
            await asyncio.sleep(0.05)


LOOK = """
import json, os, pathlib, sys
secrets, texts = json.loads(sys.argv[1]), []
for folder, below, files in os.walk("/"):
    below[:] = [name for name in below if os.path.join(folder, name) not in ("/proc", "/sys", "/usr", "/opt/kuberoll")]
    texts += [os.path.join(folder, name) for name in files]
texts += [str(path) for path in pathlib.Path("/proc").glob("[0-9]*/environ")]
seen, read = {}, []
for path in texts:
    try:
        data = pathlib.Path(path).read_bytes() if path.startswith("/proc") or os.path.isfile(path) else b""
    except OSError:
        continue
    read.append(path)
    for name, value in secrets.items():
        if value.encode() in data:
            seen.setdefault(name, []).append(path)
def writable(folder):
    try:
        pathlib.Path(folder, "x").write_text("")
    except OSError as error:
        return error.strerror
    return True
places = ["/", "/etc", "/opt/kuberoll", "/home/kuberoll", "/etc/kuberoll-environment", "/tmp", "/var/lib/kuberoll"]
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "seen": seen, "files": read, "mounts": open("/proc/self/mountinfo").read(), "init": open("/proc/1/cmdline").read(),
    "writable": {place: writable(place) for place in places},
    "capabilities": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")],
    "privileges": (status["NoNewPrivs"].strip(), status["Seccomp"].strip()),
}))
"""


async def look_into(home: ContainerPod, container: str, secrets: dict[str, str]) -> Object:
    """What a process of the server's user finds in its container, with no Landlock around it."""
    code, text = await home.execute(container, ["python", "-c", LOOK, json.dumps(secrets)], 120)
    assert code == 0, text
    found: Object = json.loads(text)
    return found


async def answers(url: str, token: str | None) -> int:
    """Status of a request."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
        return answer.status


async def check_server(node: ContainerNode, home: ContainerPod, number: int, secrets: dict[str, str]) -> None:
    """A server has its own token, and nothing else of the job."""
    own = f"Secret/env-tokens/{number}"
    assert await identity(home, "environment") == (65532, 65532, "kuberoll", "/home/kuberoll")
    seen = await look_into(home, "environment", secrets)
    # Of the container's first process, and of this one, which has the same variables.
    assert set(seen["seen"]) == {own}
    assert all(path.startswith("/proc/") for path in seen["seen"][own]), seen["seen"]
    assert "kuberoll_workers.pods.environment" in seen["init"]
    assert not [path for path in seen["files"] if "shard-" in path or path.endswith("job.json")]
    assert "/claims/" not in seen["mounts"]
    # Of the files beside the manifest the code alone.
    mounted = {path for path in seen["files"] if path.startswith("/opt/kuberoll-files/") and "/.." not in path}
    assert mounted == {"/opt/kuberoll-files/spying.py"}
    assert not [path for path in seen["files"] if path.endswith(".jsonl")]
    read_only = "Read-only file system"
    closed = dict.fromkeys(("/", "/etc", "/opt/kuberoll", "/home/kuberoll", "/etc/kuberoll-environment"), read_only)
    assert seen["writable"] == {**closed, "/tmp": True, "/var/lib/kuberoll": True}
    assert (set(seen["capabilities"]), seen["privileges"]) == ({0}, ["1", "2"])
    url = f"http://{home.address}:{contract.ENVIRONMENT_PORT}"
    statuses = {name: await answers(f"{url}{protocol.PREFIX}/info", value) for name, value in secrets.items()}
    assert statuses == {name: 200 if name == own else 401 for name in secrets}
    assert await answers(f"{url}{protocol.PREFIX}/info", None) == 401
    # Kubelets have no token.
    assert await answers(f"{url}{protocol.HEALTH}", None) == 200


async def test_environments_in_pods_of_their_own_and_the_kill_of_one(
    node: ContainerNode, worker_image: str, tmp_path: Path
) -> None:
    """The trajectories are those of a run whose environments are in its worker, though a server is killed meanwhile."""
    inline = await shipped(node, job("inline", "Inline", 0.0), tmp_path / "inline")
    parts = await children(node, inline)
    await started(node, parts, "Deployment/generation", "inline-generation")
    await play(node, inline, parts, ROWS * REPEATS)
    await node.delete("inline-generation")
    expected = contents(read_output(node.claim(NAMESPACE, "store") / "inline"))
    assert len({reward for _, reward in expected.values()}) > 1

    remote = await shipped(node, job("remote", "Remote", 0.3), tmp_path / "remote")
    parts = await children(node, remote)
    secrets = await with_tokens(node, parts)
    assert len(secrets) == len(contract.SCOPES) + 3
    servers = [name for name in parts if name.startswith("Deployment/env-")]
    assert len(servers) == 3
    for number, part in enumerate(servers):
        assert parts[part]["spec"]["template"]["spec"]["containers"][0]["image"] == worker_image
        home = await started(node, parts, part, f"remote-env-{number}")
        await check_server(node, home, number, secrets)
    await check(node, remote, parts)
    await started(node, parts, "Deployment/generation", "remote-generation")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(play(node, remote, parts, ROWS * REPEATS, beside=servers))
        for number in range(len(servers)):
            await stored(node, remote, 6 * number + 4)
            await node.crash(f"remote-env-{number}")
    for number in range(len(servers)):
        again = await node.until(f"remote-env-{number}", is_ready, SECONDS)
        [status] = again["status"]["containerStatuses"]
        assert status["restartCount"] == 1, node.log(f"remote-env-{number}")
        assert status["lastState"]["terminated"]["exitCode"] == 137
    output = node.claim(NAMESPACE, "store") / "remote"
    assert contents(read_output(output)) == expected
    numbers = json.loads((output / "aggregate_metrics.json").read_text())["environments"]
    assert numbers["spy"]["environment_metrics"] == {"user": 65532, "host": "remote-env-2"}
    written = [path for path in output.rglob("*") if path.is_file()]
    assert not [path for path in written for value in secrets.values() if value.encode() in path.read_bytes()]
    for number in range(len(servers)):
        name = f"remote-env-{number}"
        assert not [key for key, value in secrets.items() if value in node.log(name)]
        [over] = (await node.delete(name))["status"]["containerStatuses"]
        assert over["state"]["terminated"]["exitCode"] == 0, node.log(name)[-3000:]


@pytest.mark.engine
async def test_a_service_in_a_pod_of_its_own_and_its_kill(
    node: ContainerNode, worker_image: str, generation_image: str, tmp_path: Path
) -> None:
    """vLLM's own server behind its key scores every trajectory, though it is killed in between."""
    model, place = make_classifier(tmp_path / "model"), "/models/grader"
    for path in (model, *model.rglob("*")):
        path.chmod(0o755)
    mount = {"name": "model", "mountPath": place, "readOnly": True}
    service = {
        "name": "grader",
        "model": {"source": place},
        "engineArgs": dict(ENGINE_ARGS),
        "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
        "resources": {"limits": {"memory": "5Gi"}},
        "podTemplate": {
            "spec": {
                "containers": [{"name": "service", "volumeMounts": [mount]}],
                "volumes": [{"name": "model", "hostPath": {"path": str(model)}}],
            }
        },
    }
    # As long as the server takes to come again.
    patience = {"attempts": 100, "requestSeconds": 60}
    made = job_of(
        "graded",
        generation=generation(["4", "The answer is 4, I think.", "<action>up</action>"], 0.3),
        services=[service],
        environments=[
            {
                "name": "helpful",
                "type": "reward_model",
                "config": {"service": "grader", **patience},
                "stepTimeoutSeconds": 900,
            }
        ],
        dataset={"source": {"rows": [{"prompt": f"task {number}"} for number in range(8)]}, "repeats": 4},
        rollout={"maxTurns": 1, "concurrency": 4},
    )
    parts = await children(node, made)
    secrets = await with_tokens(node, parts)
    own = "Secret/service-tokens/0"
    part, pod = "Deployment/service-0", "graded-service-0"
    assert parts[part]["spec"]["template"]["spec"]["containers"][0]["image"] == generation_image
    home = await started(node, parts, part, pod)
    assert await identity(home, "service") == (65532, 65532, "kuberoll", "/home/kuberoll")
    seen = await look_into(home, "service", secrets)
    assert set(seen["seen"]) == {own}, seen["seen"]
    assert not [path for path in seen["files"] if "shard-" in path]
    assert "/claims/" not in seen["mounts"]
    assert (set(seen["capabilities"]), seen["privileges"]) == ({0}, ["1", "2"])
    url = f"http://{home.address}:{contract.SERVICE_PORT}"
    statuses = {name: await answers(f"{url}/v1/models", value) for name, value in secrets.items()}
    assert statuses == {name: 200 if name == own else 401 for name in secrets}
    assert await answers(f"{url}/v1/models", None) == 401
    await started(node, parts, "Deployment/generation", "graded-generation")
    await check(node, made, parts)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(play(node, made, parts, 32, beside=[part]))
        await stored(node, made, 4)
        await node.crash(pod)
    [status] = (await node.until(pod, is_ready, ENGINE_SECONDS))["status"]["containerStatuses"]
    assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (1, 137)
    records = read_output(node.claim(NAMESPACE, "store") / "graded")
    chats = [[{"role": item.role, "content": item.content} for item in record.messages[:2]] for record in records]
    assert [record.total_reward for record in records] == pytest.approx(logits(model, chats), abs=1e-4)
    assert not [key for key, value in secrets.items() if value in node.log(pod)]
    over = await node.delete(pod)
    assert over["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0, node.log(pod)[-3000:]
