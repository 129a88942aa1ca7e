"""Every pod that the chart and the operator make, in a container of its own image, as its own spec says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.manifest.beside import files_beside
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.console.shipping import files_config_map, with_files
from kuberoll_operator.settings import Settings
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.output.run_files import RunFiles
from tests.charts.rendering import rendered
from tests.cluster.control_plane import make_certificates
from tests.cluster.services import copy_stream
from tests.containers import kuberay
from tests.containers.node import ContainerNode, ended, is_ready, phase, pod_of, waiting
from tests.containers.runtime import ContainerPod
from tests.operator.emulator import Emulator

Object = dict[str, Any]

# Images are built before, in fixtures.
pytestmark = pytest.mark.timeout(900, func_only=True)

NAMESPACE = "rollouts"
MODEL = "/opt/kuberoll/models/tiny-policy"
ANSWERS = [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]
VLLM = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
SECONDS = 240.0
ENGINE_SECONDS = 300.0
"""Until an engine is ready: of a machine that has other things to do."""


# ---- the operator


@contextlib.asynccontextmanager
async def api_server(node: ContainerNode, directory: Path) -> AsyncIterator[Emulator]:
    """The emulator of an API server where pods find one, with what they need to trust it."""
    emulator = Emulator()
    certificates = make_certificates(directory, node.address)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate, certificates.key)
    async with emulator.running(directory):
        port = int(emulator.url.rpartition(":")[2])

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy_stream(reader, forth), copy_stream(back, writer))
            writer.close()

        async with await asyncio.start_server(forward, node.address, 0, ssl=context) as server:
            number = server.sockets[0].getsockname()[1]
            node.runtime.environment |= {
                "KUBERNETES_SERVICE_HOST": node.address,
                "KUBERNETES_SERVICE_PORT": str(number),
            }
            authority = {"ca.crt": certificates.authority.read_text()}
            await node.put(
                {"kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"}, "data": authority},
                {
                    "kind": "ServiceAccountToken",
                    "metadata": {"name": "kuberoll-operator"},
                    "data": {"token": "c2VjcmV0"},
                },
            )
            yield emulator


async def test_the_operator_starts_leads_and_ends(node: ContainerNode, operator_image: str, tmp_path: Path) -> None:
    chart = rendered()
    [deployment] = [item for item in chart if item["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == operator_image
    await node.put(*(item for item in chart if item["kind"] in ("ConfigMap", "Secret")))
    async with api_server(node, tmp_path) as emulator:
        home = node.run(pod_of(deployment, "operator"))
        ready = await node.until("operator", is_ready, SECONDS)
        [status] = ready["status"]["containerStatuses"]
        assert status["restartCount"] == 0, node.log("operator")
        # It is ready when its server answers, and leads a moment later.
        async with asyncio.timeout(SECONDS):
            [lease] = await emulator.until(lambda: emulator.all("leases") or None)
        assert lease["spec"]["holderIdentity"]
        assert await identity(home, "operator") == (65532, 65532, "kuberoll", "/home/kuberoll")
        # It writes to what it has mounted, and nowhere else.
        for path, code in (("/tmp/x", 0), ("/opt/kuberoll/x", 1), ("/home/kuberoll/x", 1)):
            assert (await home.execute("operator", ["touch", path]))[0] == code
        over = await node.delete("operator")
    assert (ended(over)["exitCode"], ended(over)["reason"]) == (0, "Completed"), node.log("operator")


async def identity(home: ContainerPod, container: str) -> tuple[int, int, str, str]:
    """User, group, name and home, as a library finds them."""
    code = "import os, pwd; u = pwd.getpwuid(os.getuid()); print(os.getuid(), os.getgid(), u.pw_name, u.pw_dir)"
    status, text = await home.execute(container, ["python", "-c", code])
    assert status == 0, text
    user, group, name, folder = text.split()
    return int(user), int(group), name, folder


# ---- a job


def job(name: str, generation: Mapping[str, Any], *, count: int, repeats: int) -> RolloutJob:
    spec = {
        "generation": {"model": {"source": MODEL}, "replicas": 1, **generation},
        "environments": [{"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 6}}],
        "dataset": {"source": {"generator": {"count": count}}, "repeats": repeats},
        "workers": {"replicas": 1, "resources": {"limits": {"memory": "2Gi"}}},
        "output": {"uri": f"pvc://store/{name}"},
    }
    head = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob"}
    return RolloutJob.model_validate({**head, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})


BESIDE = {
    "beside.py": """
import os
from pathlib import Path

from kuberoll_workers.environments import EnvironmentReturn, landlock
from lexicon import words


class Beside:
    def __init__(self, config):
        assert Path(__file__) == Path("/opt/kuberoll-files/beside.py"), __file__
        # As the kubelet mounts a ConfigMap.
        assert os.readlink(__file__) == "..data/beside.py"

    def step(self, message_log_batch, metadata):
        forbidden = [(__file__, "a"), (Path(__file__).with_name("written"), "w")]
        if landlock.abi():
            forbidden.append(("/etc/kuberoll/job.json", "r"))
        for path, mode in forbidden:
            try:
                open(path, mode).close()
            except OSError:
                continue
            raise AssertionError(f"an environment's process can open {path} with mode {mode}")
        count = len(message_log_batch)
        rewards = [float(log[-1]["content"].strip() in words.read()) for log in message_log_batch]
        observations = [{"role": "environment", "content": "."}] * count
        return EnvironmentReturn(observations, metadata, [None] * count, rewards, [True] * count)

    def global_post_process_and_metrics(self, batch):
        return batch, {"user": os.getuid(), "words": len(words.read())}
""",
    "lexicon/__init__.py": "",
    "lexicon/words.py": """
from pathlib import Path


def read():
    return Path(__file__).with_name("words.txt").read_text().split()
""",
    "lexicon/words.txt": "\n".join([*ANSWERS, "\N{GREEK SMALL LETTER ALPHA}"]),
}
"""An environment that lies beside a manifest; its steps fail where its process may do more than read its files."""


async def with_files_beside(node: ContainerNode, made: RolloutJob, count: int, directory: Path) -> RolloutJob:
    """The job with rows and an environment that `kuberoll apply` would ship; the ConfigMap of both is put on the node.

    Args:
        count: Rows, half of which are puzzles.
        directory: The manifest's.
    """
    puzzles = SlidingPuzzleEnvironment(made.spec.environments[0].config).generate_dataset(count // 2, seed=0)
    rows = [{"task_name": "puzzle", **row, "idx": index} for index, row in enumerate(puzzles)]
    rows += [{"task_name": "beside", "prompt": "Say a word.\n", "idx": index} for index in range(count // 2, count)]
    texts = {**BESIDE, "rows/all.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows)}
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    given = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
    given["spec"]["environments"].append({"name": "beside", "entrypoint": "beside:Beside", "isolation": "Process"})
    given["spec"]["dataset"]["source"] = {"uri": "rows/all.jsonl"}
    made = RolloutJob.model_validate(given)
    files = {name: path.read_bytes() for name, path in files_beside(made, directory).files.items()}
    assert set(files) == set(texts)
    await node.put(files_config_map(made.metadata.name, NAMESPACE, files))
    return with_files(made, files)


async def children(node: ContainerNode, made: RolloutJob) -> dict[str, Object]:
    """The job's children by kind and role; those that pods refer to are put on the node."""
    settings = Settings(token_key="tests", kuberay=True)  # type: ignore[arg-type]
    found = [child for _, child in children_of(made, NAMESPACE, settings)]
    await node.put(*(child for child in found if child["kind"] in ("ConfigMap", "Secret", "Service")))
    return {
        f"{child['kind']}/{child['metadata']['name'].removeprefix(made.metadata.name + '-')}": child for child in found
    }


async def check(node: ContainerNode, made: RolloutJob, parts: Mapping[str, Object]) -> None:
    """The pod that looks at what workers need, to its end."""
    name = f"{made.metadata.name}-check-0"
    node.run(pod_of(parts["Job/check"], name))
    done = await node.until(name, lambda item: phase(item) in ("Succeeded", "Failed"), SECONDS)
    assert ended(done)["exitCode"] == 0, f"{ended(done)}\n{node.log(name)[-6000:]}"


async def play(
    node: ContainerNode,
    made: RolloutJob,
    parts: Mapping[str, Object],
    trajectories: int,
    *,
    beside: Collection[str] = (),
) -> None:
    """The worker's pod, then the finish pod, to their ends.

    Args:
        beside: Further children whose pods run.
    """
    # A pod that is new here is one that nobody has run in a container.
    pods = {name for name, child in parts.items() if child["kind"] in ("Deployment", "Job", "RayService")}
    assert pods - {"Deployment/generation", "RayService/gen"} == {"Job/check", "Job/workers", "Job/finish", *beside}
    worker, finish = f"{made.metadata.name}-worker-0", f"{made.metadata.name}-finish-0"
    node.run(pod_of(parts["Job/workers"], worker, index=0))
    done = await node.until(worker, lambda item: phase(item) in ("Succeeded", "Failed"), ENGINE_SECONDS)
    assert ended(done)["exitCode"] == 0, f"{ended(done)}\n{node.log(worker)[-6000:]}"
    told = json.loads(ended(done)["message"])
    assert (told["trajectories"], told["failed"], told["done"]) == (trajectories, 0, True)
    node.run(pod_of(parts["Job/finish"], finish))
    done = await node.until(finish, lambda item: phase(item) in ("Succeeded", "Failed"), SECONDS)
    assert ended(done)["exitCode"] == 0, f"{ended(done)}\n{node.log(finish)[-6000:]}"
    for pod in (worker, finish):
        for line in node.log(pod).splitlines():
            if not line or line.startswith("--- "):
                continue  # the name of the file, and its end
            assert json.loads(line).keys() >= {"time", "level", "message"}, line
    told = json.loads(ended(done)["message"])
    assert (told["trajectories"], told["missing"]) == (trajectories, 0)
    output = node.claim(NAMESPACE, "store") / made.metadata.name
    keys = [record.key for record in RunFiles(str(output)).trajectories()]
    assert len(keys) == len(set(keys)) == trajectories
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in output.rglob("*")}
    assert owners == {(65532, 65532)}
    assert (output / "report.html").exists()


@pytest.mark.parametrize("engine", ["Simulated", pytest.param("VLLM", marks=pytest.mark.engine)])
async def test_a_job_of_native_generation(
    node: ContainerNode, worker_image: str, generation_image: str, engine: str, tmp_path: Path
) -> None:
    simulated = {"engine": "Simulated", "simulated": {"responses": ANSWERS}, "engineArgs": {"max_model_len": 512}}
    real = {"engine": "VLLM", "engineArgs": VLLM, "resources": {"limits": {"memory": "5Gi"}}}
    generation = {"backend": "Native", **(simulated if engine == "Simulated" else real)}
    count = 16 if engine == "Simulated" else 2
    made = job(engine.lower(), generation, count=count, repeats=4)
    made = await with_files_beside(node, made, count, tmp_path / "manifest")
    parts = await children(node, made)
    await check(node, made, parts)
    name = f"{made.metadata.name}-generation-0"
    home = node.run(pod_of(parts["Deployment/generation"], name))
    ready = await node.until(name, is_ready, ENGINE_SECONDS)
    assert ready["status"]["containerStatuses"][0]["restartCount"] == 0
    assert await identity(home, "generation") == (65532, 65532, "kuberoll", "/home/kuberoll")
    await play(node, made, parts, 4 * count)
    output = RunFiles(str(node.claim(NAMESPACE, "store") / made.metadata.name))
    rewards = [record.total_reward for record in output.trajectories() if record.task_name == "beside"]
    # Whatever the simulated engine says is one of the words.
    assert len(rewards) == 2 * count
    assert engine != "Simulated" or set(rewards) == {1.0}
    numbers = json.loads((node.claim(NAMESPACE, "store") / made.metadata.name / "aggregate_metrics.json").read_text())
    assert numbers["environments"]["beside"]["environment_metrics"] == {"user": 65532, "words": len(ANSWERS) + 1}
    over = await node.delete(name)
    assert ended(over)["exitCode"] == 0, node.log(name)[-6000:]


# ---- KubeRay's pods


async def test_a_job_of_kuberays_pods(node: ContainerNode, worker_image: str, generation_image: str) -> None:
    generation = {"backend": "KubeRay", "engine": "Simulated", "simulated": {"responses": ANSWERS}}
    made = job("ray", {**generation, "engineArgs": {"max_model_len": 512}}, count=16, repeats=4)
    parts = await children(node, made)
    service = parts["RayService/gen"]
    await node.put(kuberay.secret_of(service, "ray-token"), kuberay.head_service(service))
    head, engine = "ray-head", "ray-engines-0"
    home = node.run(pod_of(service, head, template=kuberay.head_template(service)))
    started = await node.until(head, is_ready, ENGINE_SECONDS)
    assert await identity(home, "head") == (65532, 65532, "kuberoll", "/home/kuberoll")
    node.run(pod_of(service, engine, template=kuberay.worker_template(service)))
    # What KubeRay's operator does when the head's dashboard answers.
    url = f"http://{started['status']['podIP']}:{kuberay.DASHBOARD_PORT}/api/serve/applications/"
    config = service["spec"]["serveConfigV2"].encode()
    await _until_accepted(lambda: _put(url, config, "ray-token"))
    ready = await node.until(engine, is_ready, ENGINE_SECONDS)
    assert ready["status"]["containerStatuses"][0]["restartCount"] == 0
    await play(node, made, parts, 64)
    assert is_ready(node.pod(engine))
    assert is_ready(node.pod(head))
    for name in (engine, head):
        await node.delete(name)


def _put(url: str, body: bytes, token: str) -> bool:
    headers = {"Content-Type": "application/json", "x-ray-authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data=body, method="PUT", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _until_accepted(ask: Callable[[], bool]) -> None:
    async with asyncio.timeout(ENGINE_SECONDS):
        while True:
            if await asyncio.to_thread(ask):
                return
            await asyncio.sleep(1)


# ---- what the pods tell when something is wrong


async def test_a_refused_job_says_why_in_its_pods_message(node: ContainerNode, worker_image: str) -> None:
    made = job("wrong", {"backend": "Native"}, count=1, repeats=1)
    made.spec.environments[0].config["size"] = "large"
    parts = await children(node, made)
    node.run(pod_of(parts["Job/workers"], "wrong-0", index=0))
    node.run(pod_of(parts["Job/check"], "wrong-check"))
    for name in ("wrong-0", "wrong-check"):
        done = await node.until(name, lambda item: phase(item) == "Failed", SECONDS)
        assert ended(done)["exitCode"] == 78
        assert "size" in json.loads(ended(done)["message"])["cause"]


async def test_a_worker_that_takes_too_much_is_said_to_be_out_of_memory(node: ContainerNode, worker_image: str) -> None:
    made = job("small", {"backend": "Native"}, count=1, repeats=1)
    made.spec.workers.resources.limits["memory"] = "32Mi"
    parts = await children(node, made)
    node.run(pod_of(parts["Job/workers"], "small-0", index=0))
    done = await node.until("small-0", lambda item: phase(item) == "Failed", SECONDS)
    assert (ended(done)["exitCode"], ended(done)["reason"]) == (137, "OOMKilled")


async def test_an_image_that_is_not_there(node: ContainerNode) -> None:
    made = job("nowhere", {"backend": "Native", "image": "missing/model:1"}, count=1, repeats=1)
    parts = await children(node, made)
    node.run(pod_of(parts["Deployment/generation"], "nowhere"))
    seen = await node.until("nowhere", lambda item: waiting(item).get("reason") == "ImagePullBackOff", SECONDS)
    assert "missing/model:1" in waiting(seen)["message"]
