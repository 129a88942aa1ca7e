"""Weights from a trainer's memory to two replicas of a real policy, while one of the three is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from kuberoll.trainer import Broadcast, PolicyEndpoint, Publisher, PublishFailed, senders
from kuberoll_workers.data.weights.manifest import MODEL_FILE
from kuberoll_workers.local.watchdog import processes_of
from tests.local.support import TINY
from tests.serving.hosts import PATIENCE_SECONDS, TOKENS, StartingHost, starting, until_ready
from tests.serving.stepped_model import greedy_ids, stepped
from tests.trainer.gated_sender import Gate

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long]

ENGINE: dict[str, Any] = {
    "engine": "VLLM",
    "simulated": None,
    "engine_args": {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 27,
        "weight_transfer_config": {"backend": "gloo"},
    },
}
PROMPT = list(range(5, 25))
COUNT = 24


class Serving(NamedTuple):
    """A policy with two replicas."""

    host: StartingHost
    url: str

    @property
    def endpoint(self) -> PolicyEndpoint:
        return PolicyEndpoint(self.url, TOKENS.weights)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with starting(model=str(TINY), tokenizer=str(TINY), replicas=2, tokens=TOKENS, torch=True, **ENGINE) as started:
        yield Serving(started, until_ready(started)[-1]["url"])


def greedy(model: Any) -> list[int]:
    return greedy_ids(model, PROMPT, COUNT)


def ask(url: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{url}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {TOKENS.generate}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.loads(answer.read())


def said(url: str) -> tuple[list[int], list[Any]]:
    """What the replica at an address says, and the versions of its tokens."""
    settings = {"max_tokens": COUNT, "min_tokens": COUNT, "temperature": 0.0}
    found = ask(url, "/v1/generate", {"token_ids": PROMPT, "sampling_params": settings})
    return found["token_ids"], found["policy_versions"]


def everywhere(serving: Serving) -> list[tuple[list[int], list[Any]]]:
    """What each replica says."""
    replicas = ask(serving.url, "/replicas")["replicas"]
    assert len(replicas) == 2
    return [said(replica["url"]) for replica in replicas]


@contextmanager
def asking(serving: Serving) -> Iterator[list[str]]:
    """Ask again and again; the list has the versions of the answers, and an error raises here in the end."""
    versions: list[str] = []
    errors: list[Exception] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                versions.extend(version for version, *_ in said(serving.url)[1])
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield versions
    finally:
        ended.set()
        thread.join(PATIENCE_SECONDS)
    assert errors == []


def test_every_replica_says_what_the_published_model_says(serving: Serving, tmp_path: Path) -> None:
    with Publisher(endpoint=serving.endpoint, location=tmp_path, transport="broadcast") as publisher, asking(serving):
        for version in (1, 2):
            model = stepped(version)
            assert len(publisher.publish(model, version=version).replicas) == 2
            assert everywhere(serving) == [(greedy(model), [[str(version), 0, COUNT]])] * 2
    assert not list(tmp_path.rglob(MODEL_FILE))


def test_a_trainer_that_is_killed_in_the_middle_leaves_the_old_version(serving: Serving, tmp_path: Path) -> None:
    location = tmp_path / "weights"
    with Publisher(endpoint=serving.endpoint, location=location, transport="broadcast") as publisher:
        version = publisher.next_version()
        old = stepped(version)
        publisher.publish(old, version=version)
    saved = tmp_path / "model"
    shutil.copytree(TINY, saved)
    stepped(version + 1).save_pretrained(saved)
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.gated_sender", serving.url, TOKENS.weights, location, saved,
         str(version + 1)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with trainer, asking(serving) as versions:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"half\n"
        trainer.kill()
        trainer.wait()
        while len(serving.endpoint.weights().problems) < 2:
            pass
        before = len(versions)
        while len(versions) < before + 20:
            pass
    found = serving.endpoint.weights()
    assert (found.wanted, set(found.replicas.values())) == (str(version + 1), {str(version)})
    assert set(versions) == {str(version)}
    assert everywhere(serving) == [(greedy(old), [[str(version), 0, COUNT]])] * 2
    # It starts again.
    with Publisher(endpoint=serving.endpoint, location=location, transport="broadcast") as publisher:
        new = stepped(version + 2)
        assert publisher.next_version() == version + 2
        publisher.publish(new, version=version + 2)
    assert everywhere(serving) == [(greedy(new), [[str(version + 2), 0, COUNT]])] * 2


def test_a_replica_that_is_killed_in_the_middle_is_replaced_by_one_with_the_new_version(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(endpoint=serving.endpoint, location=tmp_path, transport=Broadcast(chunk_bytes=1 << 16)) as publisher:
        version = publisher.next_version()
        before = publisher.publish(stepped(version), version=version).replicas
        gate = Gate(version + 1)
        monkeypatch.setitem(senders.SENDERS, "gloo", gate.sender)
        # Another sender is made for another group.
        assert publisher._transport._server is not None  # type: ignore[attr-defined]
        publisher._transport._server._leave_group()  # type: ignore[attr-defined]
        new = stepped(version + 1)
        results: list[Any] = []

        def publish() -> None:
            try:
                results.append(publisher.publish(new, version=version + 1))
            except PublishFailed as error:
                results.append(error)

        thread = threading.Thread(target=publish)
        thread.start()
        assert gate.reached.wait(PATIENCE_SECONDS)
        victim = next(process for process in processes_of(serving.host.run_id) if "EngineCore" in process.name())
        psutil.Process(victim.pid).kill()
        gate.opened.set()
        thread.join(PATIENCE_SECONDS)
        [done] = results
        assert not isinstance(done, PublishFailed), done
        # The one that was killed is gone, or serves the new version as all do.
        assert serving.endpoint.weights().everywhere == str(version + 1)
        while len(found := serving.endpoint.weights().replicas) < 2:
            assert set(found.values()) == {str(version + 1)}
        # The replacement had the new version before its first request: from the trainer, as there are no files.
        assert everywhere(serving) == [(greedy(new), [[str(version + 1), 0, COUNT]])] * 2
        assert len({*before} & {*found}) == 1
    assert not list(tmp_path.rglob(MODEL_FILE))
