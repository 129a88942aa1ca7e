"""Environment worker pods as processes, against a real endpoint: how they end, what they say, what they leave."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from kuberoll_api.contract import PodProgress
from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.output import records
from kuberoll_workers.output.run_directory import MANIFEST
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.output.turn_log import TurnLog
from kuberoll_workers.serving.ray_settings import free_ports
from tests.local.support import TINY, Endpoint, endpoint
from tests.output.s3 import S3Server, s3, s3_server
from tests.output.support import Observed
from tests.output.test_shard_locks import other_worker
from tests.pods.support import Pod, pod

__all__ = ["endpoint", "s3", "s3_server"]

MODULE = "kuberoll_workers.pods.worker"
SHARDS = 2


def job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "test"},
        "spec": {
            "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
            "environments": [
                {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "shuffleMoves": 6, "maxMoves": 6}}
            ],
            "dataset": {"source": {"generator": {"count": 6}}, "repeats": 3},
            "rollout": {"concurrency": 18},
            **spec,
        },
    }


class Place:
    """Where a run's pods work."""

    def __init__(self, directory: Path, endpoint: str, output: str | None = None) -> None:
        self.directory = directory
        self.output = output or str(directory / "output")
        self.endpoint = endpoint
        self.job = job()
        self.turns: str | None = None

    def config(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "endpoint": self.endpoint,
            "port": 8000,
            "shard_count": SHARDS,
            "output": self.output,
            "turns": self.turns,
            "base": str(self.directory),
            "something": "for other pods",
        }

    def pod(self, shard: int, **variables: str) -> AbstractAsyncContextManager[Pod]:
        return pod(MODULE, self.config(), self.directory / "pods", shard=shard, **variables)

    async def finish(self, shard: int) -> dict[str, Any]:
        """Run a shard to its end; the termination message."""
        async with self.pod(shard) as started:
            assert await started.end() == 0, started.log
            return started.message()

    def files(self) -> list[str]:
        """Names of the output's files."""
        return sorted(path.name for path in Path(self.output).iterdir())

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def contents(self) -> dict[Any, Any]:
        """What was stored, each trajectory once."""
        storage = open_storage(self.output)
        found = [record for shard in storage.shards() for record in records.trajectories(storage, shard)]
        assert len({record.key for record in found}) == len(found)
        return {
            record.key: ([list(message.token_ids) for message in record.messages], record.rewards) for record in found
        }


@pytest.fixture
def place(tmp_path: Path, endpoint: Endpoint) -> Place:
    return Place(tmp_path, endpoint.url)


def hold_third_turns(endpoint: Endpoint) -> None:
    endpoint.holds = lambda request: request.request_id.split("-")[3] == "3"


async def test_pods_of_two_shards_start_at_once_and_do_the_whole_job(place: Place) -> None:
    async with place.pod(0) as first, place.pod(1) as second:
        assert [await first.end(), await second.end()] == [0, 0], first.log + second.log
        messages = [first.message(), second.message()]
    run = RunFiles(place.output)
    stored = list(run.trajectories())
    assert len(stored) == 18
    assert {path.rpartition("/")[2] for path in run.storage.files()} == {
        MANIFEST,
        "shard-00000.jsonl",
        "shard-00001.jsonl",
    }
    for shard, message in enumerate(messages):
        mine = [record for record in stored if record.task_index % SHARDS == shard]
        assert message == {
            "shard": shard,
            "planned": 9,
            "trajectories": 9,
            "failed": 0,
            "dropped": 0,
            "turns": sum(record.turn_count for record in mine),
            "generated_tokens": sum(record.tokens.generated for record in mine),
            "reward_sum": pytest.approx(sum(record.total_reward for record in mine)),
            "commit": None,  # its model is a directory
            "done": True,
            "cause": "",
        }


async def test_a_pod_under_way_answers(place: Place, endpoint: Endpoint) -> None:
    hold_third_turns(endpoint)
    async with place.pod(0) as started:
        await started.until(lambda: len(endpoint.waiting) > 3)
        body = await started.until_answers("/progress", lambda _, body: json.loads(body)["planned"] > 0)
        progress = json.loads(body)
        assert set(progress) == {
            "shard",
            "planned",
            "trajectories",
            "failed",
            "turns",
            "generated_tokens",
            "reward_sum",
            "generating",
            "policy_version",
            "failure",
            "waiting",
            "held",
            "starved",
            "answering",
            "unanswering",
        }
        assert (progress["shard"], progress["planned"]) == (0, 9)
        assert (progress["generating"], progress["policy_version"]) == (len(endpoint.waiting), "0")
        assert progress["trajectories"] < 9
        assert await started.get("/healthz") == (200, "ok")
        status, metrics = await started.get("/metrics")
        assert status == 200
        assert 'kuberoll_turns_total{environment="puzzle",rolloutjob="test",turn="2"}' in metrics
        assert (await started.get("/anything"))[0] == 404
        endpoint.holds = lambda request: False
        # Those that are held are given up with the pod.
    lines = [json.loads(line) for line in started.log.splitlines()]
    assert {(line["job"], line["shard"]) for line in lines} == {("test", 0)}
    assert lines[0]["level"] == "info"


async def test_a_drained_pod_says_so_and_the_next_one_goes_on(place: Place, endpoint: Endpoint, tmp_path: Path) -> None:
    whole = Place(tmp_path / "whole", endpoint.url)
    whole.job["spec"]["rollout"]["concurrency"] = place.job["spec"]["rollout"]["concurrency"] = 2
    await whole.finish(0)
    endpoint.holds = lambda request: len(endpoint.requests) > stop_after
    stop_after = len(endpoint.requests) + 8
    async with place.pod(0) as first:
        await first.until(lambda: len(endpoint.waiting) == 2)
        first.signal(signal.SIGTERM)
        await first.until(lambda: "stopping" in first.log)
        endpoint.released.set()
        assert await first.end() == 75, first.log
        message = first.message()
    assert (message["done"], message["cause"]) == (False, "stopped before the shard was done")
    assert 0 < message["trajectories"] == len(place.contents()) < message["planned"]
    endpoint.holds = lambda request: False
    last = await place.finish(0)
    assert (last["done"], last["trajectories"]) == (True, 9)
    assert last["reward_sum"] == pytest.approx(sum(sum(rewards) for _, rewards in place.contents().values()))
    assert place.contents() == whole.contents()


async def test_a_pod_that_cannot_finish_what_is_in_flight_gives_it_up(place: Place, endpoint: Endpoint) -> None:
    hold_third_turns(endpoint)
    async with place.pod(0, KUBEROLL_DRAIN_SECONDS="0") as started:
        await started.until(lambda: len(endpoint.waiting) > 3)
        started.signal(signal.SIGTERM)
        assert await started.end() == 75, started.log
        assert started.message()["trajectories"] == len(place.contents())
    endpoint.holds = lambda request: False
    assert (await place.finish(0))["trajectories"] == 9


async def test_a_second_signal_ends_a_drain(place: Place, endpoint: Endpoint) -> None:
    hold_third_turns(endpoint)
    async with place.pod(0) as started:
        await started.until(lambda: len(endpoint.waiting) > 3)
        started.signal(signal.SIGTERM)
        await started.until(lambda: "stopping" in started.log)
        started.signal(signal.SIGTERM)
        assert await started.end() == 75, started.log


async def test_a_killed_pod_is_replaced_by_another(place: Place, endpoint: Endpoint) -> None:
    place.turns = place.output
    hold_third_turns(endpoint)

    def at_third_turns() -> bool:
        """Whether each of the shard's trajectories is stored or waits for its third turn, the first two in the log."""
        keys = [TrajectoryKey(*map(int, session.split("-")[:2])) for session in endpoint.waiting]
        log = TurnLog(Path(place.output), 1, seconds=Observed()).partials
        at_third = [key for key in keys if key in log and len(log[key].turns) == 2]
        return len(at_third) == len(keys) == 9 - len(place.contents())

    async with place.pod(1) as killed:
        await killed.until(lambda: len(endpoint.waiting) > 3 and at_third_turns())
        killed.signal(signal.SIGKILL)
        assert await killed.end() == -signal.SIGKILL
        with pytest.raises(FileNotFoundError):
            killed.message()
    before, asked = place.contents(), len(endpoint.requests)
    endpoint.holds = lambda request: False
    message = await place.finish(1)
    assert (message["trajectories"], message["planned"], message["done"]) == (9, 9, True)
    after = place.contents()
    assert before.items() <= after.items()
    # The turns were beside the shard, and outlived the pod.
    assert min(int(request.split("-")[3]) for request in endpoint.requests[asked:]) == 3
    # A shard that is done is nothing to do.
    asked = len(endpoint.requests)
    assert await place.finish(1) == message
    assert len(endpoint.requests) == asked


async def test_two_pods_on_an_object_store(tmp_path: Path, endpoint: Endpoint, s3: tuple[S3Server, str]) -> None:
    place = Place(tmp_path, endpoint.url, output=f"{s3[1]}/run")
    async with place.pod(0) as first, place.pod(1) as second:
        assert [await first.end(), await second.end()] == [0, 0], first.log + second.log
    assert len(place.contents()) == 18
    manifest = RunFiles(place.output).manifest()
    assert manifest is not None
    assert (manifest.shards, manifest.inputs["trajectories"]) == (SHARDS, 18)


async def test_a_dataset_that_is_mounted(place: Place) -> None:
    rows = SlidingPuzzleEnvironment({"size": 2}).generate_dataset(3, 0)
    (place.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.job["spec"]["dataset"]["source"] = {"configMap": {"name": "rows", "key": "rows.jsonl"}}
    messages = [await place.finish(shard) for shard in range(SHARDS)]
    assert [message["trajectories"] for message in messages] == [6, 3]


async def refusal(place: Place, shard: int = 0) -> str:
    async with place.pod(shard) as started:
        assert await started.end() == 78, started.log
        message = started.message()
        assert message["done"] is False
        assert "Traceback" not in started.log
        return str(message["cause"])


async def test_another_run_is_refused(place: Place) -> None:
    await place.finish(0)
    contents = place.contents()
    place.job["spec"]["generation"]["sampling"] = {"temperature": 0.5}
    place.job["spec"]["dataset"]["source"]["generator"]["count"] = 7
    cause = await refusal(place)
    assert "spec.generation.sampling.temperature: was 1.0, is 0.5" in cause
    assert "dataset: rows: was 6, is 7" in cause
    assert "choose another spec.output.uri" in cause
    assert place.contents() == contents


async def check(place: Place) -> tuple[int, dict[str, Any]]:
    """Run the check; its exit code and termination message."""
    async with pod(MODULE, place.config(), place.directory / "pods", arguments=["--check"]) as started:
        return await started.end(), started.message()


async def test_a_check_needs_no_endpoint_counts_all_shards_and_writes_the_manifest(place: Place) -> None:
    place.endpoint = "http://generation.invalid:8000"
    code, message = await check(place)
    assert (code, message["done"], message["cause"]) == (0, True, "")
    assert message["planned"] == 18
    assert place.files() == [MANIFEST]
    # Workers find what it left as their own.
    assert (await check(place))[0] == 0


async def test_a_check_refuses_an_output_that_cannot_be_written(place: Place) -> None:
    place.output = str(place.directory / "pods" / "a-file" / "output")
    place.write("pods/a-file", "no directory")
    code, message = await check(place)
    assert code in {1, 78}
    assert place.output in message["cause"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dataset": {"source": {"uri": "nowhere.jsonl"}}}, "apply the job with `kuberoll apply`"),
        ({"dataset": {"source": {"rows": [{"messages": []}]}}}, "spec.dataset.source.rows[0]"),
        ({"environments": [{"name": "e", "entrypoint": "no_such:Thing"}]}, "there is no module 'no_such'"),
        ({"generation": {"model": {"source": "/no/model"}, "engine": "Simulated"}}, "spec.workers.podTemplate"),
        (
            {"generation": {"model": {"source": str(TINY), "chatTemplate": "{% if %}"}, "engine": "Simulated"}},
            "spec.generation.model.chatTemplate: it is not Jinja: line 1",
        ),
        ({"workers": {"replicas": -1}}, "replicas"),
    ],
)
async def test_what_cannot_be_done_is_refused(place: Place, spec: dict[str, Any], said: str) -> None:
    place.job = job(**spec)
    assert said in await refusal(place)
    # The check finds it before an engine is started.
    code, message = await check(place)
    assert code == 78
    assert said in message["cause"]


FAULTY = """
class Faulty:
    def __init__(self, config):
        self.limit = config["limit"]

    def step(self, logs, metadata):
        raise ValueError("no step")

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_the_line_of_a_person_s_code_is_in_messages_and_logs(
    place: Place, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("code/faulty.py", FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(place.directory / "code"))
    environment = {"name": "e", "entrypoint": "faulty:Faulty", "isolation": isolation}
    rows = {"source": {"rows": [{"prompt": str(number)} for number in range(4)]}, "repeats": 2}
    place.job = job(environments=[environment], dataset=rows)
    async with pod(MODULE, place.config(), place.directory / "pods", arguments=["--check"]) as started:
        assert await started.end() == 78, started.log
        cause, log = started.message()["cause"], started.log
    assert "its constructor raised KeyError: 'limit'\n  faulty.py:4 in __init__\n" in cause
    assert "Traceback (most recent call last):" in log
    assert log.count("KeyError: 'limit'") >= 2

    place.job = job(environments=[{**environment, "config": {"limit": 1}}], dataset=rows)
    answers: list[dict[str, Any]] = []
    for shard in range(SHARDS):
        async with place.pod(shard) as started:
            assert await started.end() == 0, started.log
            assert started.log.count("ValueError: no step\\n") <= 1
            answers.append({"log": started.log, "message": started.message()})
    assert sum(answer["message"]["failed"] for answer in answers) == 8
    assert all('faulty.py\\", line 7, in step' in answer["log"] for answer in answers if answer["message"]["failed"])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ mesages[0].content }}", "it cannot render a user's message: UndefinedError"),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}",
            "the chat template can't render observations token-exactly: it raises TemplateError: one only",
        ),
    ],
)
async def test_a_template_that_cannot_render_is_not_tried_again(place: Place, template: str, said: str) -> None:
    model = {"source": str(TINY), "chatTemplate": template}
    generation = {"model": model, "engine": "Simulated"}
    place.job = job(generation=generation, rollout={"observationTemplate": "ChatTemplate"})
    found = await refusal(place)
    assert said in found
    assert "generation.model.chatTemplate" in found


async def test_a_template_without_tools_is_refused_where_an_environment_declares_some(place: Place) -> None:
    place.write("rows.jsonl", '{"prompt": "Two pears."}\n')
    shop = {"name": "shop", "entrypoint": "tests.environments.calling:Shop"}
    place.job = job(environments=[shop], dataset={"source": {"uri": "rows.jsonl"}})
    assert "spec.environments (shop) declares tools: tools: the chat template leaves them out" in await refusal(place)


async def test_trajectories_of_nobody_knows_what_are_refused(place: Place) -> None:
    await place.finish(0)
    (Path(place.output) / MANIFEST).unlink()
    assert f"has trajectories but no {MANIFEST}" in await refusal(place)


@pytest.mark.parametrize(("index", "said"), [("7", "shard 7 is not among"), ("", "JOB_COMPLETION_INDEX")])
async def test_a_pod_of_no_shard_is_refused(place: Place, index: str, said: str) -> None:
    async with place.pod(0, JOB_COMPLETION_INDEX=index) as started:
        assert await started.end() == 78
        assert said in started.message()["cause"]


async def test_an_endpoint_that_does_not_come_is_tried_again_by_another_pod(place: Place) -> None:
    place.endpoint = "http://generation.invalid:8000"
    place.job["spec"]["startupDeadlineSeconds"] = 1
    async with place.pod(0) as started:
        assert await started.end() == 1
        assert "was not ready within 1 s" in started.message()["cause"]


async def test_an_endpoint_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    place = Place(tmp_path, f"http://127.0.0.1:{port}")
    async with place.pod(0) as started:
        await started.until(lambda: "0 of 9 trajectories are stored" in started.log)
        async with Endpoint().serving(port):
            assert await started.end() == 0, started.log


async def test_a_pod_that_is_stopped_while_it_waits_ends_at_once(place: Place) -> None:
    place.endpoint = "http://generation.invalid:8000"
    async with place.pod(0) as started:
        await started.until(lambda: "0 of 9 trajectories are stored" in started.log)
        started.signal(signal.SIGTERM)
        assert await started.end() == 75
        assert started.message()["cause"] == "stopped before the work began"


@asynccontextmanager
async def somebody_elses() -> AsyncIterator[str]:
    """An OpenAI-compatible server that wants a key, and says neither its window nor token ids."""

    async def models(request: web.Request) -> web.Response:
        known = request.headers.get("authorization") == "Bearer the key"
        return web.json_response({"data": [{"id": "m"}]} if known else {}, status=200 if known else 401)

    async def completions(request: web.Request) -> web.Response:
        await request.read()
        choice = {"index": 0, "text": "<action>up</action>", "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 3, "prompt_tokens": 3}})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url(""))
    finally:
        await server.close()


async def test_a_pod_that_cannot_reach_the_policy_says_so_while_it_waits(place: Place) -> None:
    (port,) = free_ports(1)
    place.endpoint = f"http://127.0.0.1:{port}"
    async with place.pod(0) as started:
        await started.until(lambda: "waiting for the policy: " in started.log)
        line = next(line for line in started.log.splitlines() if "waiting for the policy" in line)
        assert place.endpoint in line
        assert "connection refused" in line
        started.signal(signal.SIGTERM)
        assert await started.end() != 0


async def test_a_policy_that_goes_in_mid_run_is_in_the_progress_and_ends_the_pod_in_time(tmp_path: Path) -> None:
    endpoint = Endpoint()
    hold_third_turns(endpoint)
    async with AsyncExitStack() as stack:
        async with endpoint.serving():
            place = Place(tmp_path, endpoint.url)
            retries = {"timeouts": {"generationSeconds": 12}, "retries": {"generationAttempts": 2}}
            place.job["spec"]["rollout"] |= retries
            started = await stack.enter_async_context(place.pod(0))
            await started.until(lambda: len(endpoint.waiting) > 0)
            assert json.loads((await started.get("/progress"))[1])["waiting"] == ""
            endpoint.released.set()
        reason = f"{endpoint.url}: connection refused"
        words = f"its policy: {reason}"
        await started.until_answers("/progress", lambda _, body: json.loads(body)["waiting"] == words)
        # Which does not answer, for the operator, which knows its pod.
        await started.until_answers("/progress", lambda _, body: json.loads(body)["unanswering"] != [])
        told = TypeAdapter(PodProgress).validate_json((await started.get("/progress"))[1])
        assert told.answering == 0
        assert [(server.url, server.problem) for server in told.unanswering] == [(endpoint.url, reason)]
        assert await started.end() == 1, started.log
    assert re.search(rf"waiting for the endpoint, 0:[12]\d left: {re.escape(reason)}", started.log), started.log
    assert "the endpoint did not answer for 24 s" in started.message()["cause"]


async def test_a_pod_whose_shard_another_one_writes_waits_and_says_so(place: Place) -> None:
    # As one that goes on behind a partition, on a volume that both have.
    words = "the lock of shard 0, which another worker holds"
    with other_worker(Path(place.output), shard=0) as other:
        async with place.pod(0) as started:
            await started.until_answers("/progress", lambda _, body: words in body)
            other.kill()
            assert await started.end() == 0, started.log
    assert place.contents()


def external_job(url: str, **rollout: Any) -> dict[str, Any]:
    external = {"url": url, "api": "OpenAI", "apiKeyVariable": "THE_KEY"}
    generation = {"model": {"source": str(TINY)}, "backend": "External", "external": external}
    return job(generation=generation, rollout={"concurrency": 18, **rollout})


async def test_an_endpoint_that_does_not_say_its_window_has_the_job_s(place: Place) -> None:
    async with somebody_elses() as url:
        place.job = external_job(url, maxSequenceLength=400)
        async with place.pod(0, THE_KEY="the key") as started:
            assert await started.end() == 0, started.log
            assert started.message()["failed"] == 0
    assert place.contents()


@pytest.mark.parametrize(("variables", "said"), [({"THE_KEY": "another"}, "401"), ({}, "THE_KEY")])
async def test_a_key_that_does_not_fit_is_refused(place: Place, variables: dict[str, str], said: str) -> None:
    async with somebody_elses() as url:
        place.job = external_job(url, maxSequenceLength=400)
        async with place.pod(0, **variables) as started:
            assert await started.end() == 78, started.log
            cause = started.message()["cause"]
    assert cause.startswith("spec.generation.external")
    assert said in cause


async def test_a_token_of_the_direct_path_that_can_be_guessed_is_refused(place: Place) -> None:
    variable = "KUBEROLL_TOKEN_READ_ACCESS_TRAINER"
    async with place.pod(0, **{variable: "read"}) as started:
        assert await started.end() == 78, started.log
        assert f"{variable}: a token has at least 16 visible ASCII characters" in started.message()["cause"]


@pytest.mark.parametrize(
    ("store", "token", "status"), [(False, "read" * 8, 404), (True, "", 404), (True, "read" * 8, 401)]
)
async def test_the_direct_path_is_there_for_those_with_a_token_where_the_output_is_an_object_store(
    place: Place, endpoint: Endpoint, s3: tuple[S3Server, str], store: bool, token: str, status: int
) -> None:
    hold_third_turns(endpoint)
    place.output = f"{s3[1]}/run" if store else place.output
    variables = {"KUBEROLL_TOKEN_READ_ACCESS_TRAINER": token} if token else {}
    async with place.pod(0, **variables) as started:
        await started.until_answers("/progress", lambda code, _: code == 200)
        assert (await started.get("/v1/parts"))[0] == status
