"""The files by which `kuberoll run` finds the engines of `kuberoll serve`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kuberoll_api.contract import ServeArgs
from kuberoll_workers.local import engines
from kuberoll_workers.local.engines import EngineExists, ServedEngine
from kuberoll_workers.local.generation import served_endpoint
from kuberoll_workers.local.preflight import JobRefused
from kuberoll_workers.policy.auth import Tokens
from tests.trainer.on_policy import job as paced

ARGS = ServeArgs(model="/m", tokenizer="/m", engine="VLLM", engine_args={"dtype": "float32", "max_model_len": 512})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kuberoll" / "serve"


def engine(name: str = "job", url: str = "http://127.0.0.1:20000") -> ServedEngine:
    tokens = Tokens(generate="g", weights="w", read="r")
    return ServedEngine(name=name, url=url, pid=os.getpid(), tokens=tokens, args=msgspec.to_builtins(ARGS), log="/l")


def test_an_engine_is_found_by_its_name_and_its_url_while_it_serves(state: Path) -> None:
    assert engines.find("job") is None
    with engines.claim("job") as path:
        # It is still starting.
        assert engines.find("job") is None
        engines.publish(path, engine())
        assert engines.find("job") == engine()
        assert engines.find_by_url("http://127.0.0.1:20000/v1/") == engine()
        assert engines.find_by_url("http://127.0.0.1:20001") is None
        assert engines.find("other") is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert engines.find("job") is None
    assert not path.exists()


def test_a_name_serves_one_engine() -> None:
    with engines.claim("job"), pytest.raises(EngineExists, match="'job' is starting or serving already"):
        engines.claim("job").__enter__()


def test_the_file_of_an_engine_that_was_killed_is_not_believed(state: Path) -> None:
    state.mkdir(parents=True)
    engines.publish(state / "job.json", engine())
    assert engines.find("job") is None
    with engines.claim("job") as path:
        assert path.read_bytes() == b""


async def test_the_end_of_an_engine_is_seen_when_its_file_is_emptied_or_no_longer_locked() -> None:
    for end in ("withdrawn", "gone"):
        with engines.claim("job") as path:
            engines.publish(path, engine())
            waiting = asyncio.ensure_future(engines.ended(engine()))
            await asyncio.sleep(0)
            assert not waiting.done()
            if end == "withdrawn":
                engines.withdraw(path)
                await waiting
                # Its name is still taken.
                with pytest.raises(EngineExists):
                    engines.claim("job").__enter__()
        await waiting


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"weights": None, "drain_seconds": 1.0}, []),
        ({"model": "/n"}, ['spec.generation.model.source: there "/m", here "/n"']),
        (
            {"engine_args": {"max_model_len": 256, "seed": 1}},
            [
                'spec.generation.engineArgs.dtype: there "float32", here not set',
                "spec.generation.engineArgs.max_model_len: there 512, here 256",
                "spec.generation.engineArgs.seed: there not set, here 1",
            ],
        ),
        ({"replicas": 2}, ["spec.generation.replicas: there 1, here 2"]),
    ],
)
def test_differences_are_named_by_the_manifest_s_fields(changes: dict[str, Any], lines: list[str]) -> None:
    assert engines.differences(engine(), dataclasses.replace(ARGS, **changes)) == lines


def test_a_claim_made_while_another_one_ends_holds_the_file_that_is_there() -> None:
    published: list[bool] = []

    def serve_often(url: str) -> None:
        for _ in range(1500):
            with contextlib.suppress(EngineExists), engines.claim("job") as path:
                engines.publish(path, engine(url=url))
                published.append(engines.find("job") == engine(url=url))

    threads = [threading.Thread(target=serve_often, args=(f"http://127.0.0.1:{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert published
    assert all(published), f"{published.count(False)} of {len(published)} were not found"


def test_a_run_starts_no_second_engine_while_that_of_its_name_is_starting() -> None:
    job = paced()
    with engines.claim(job.metadata.name):
        with pytest.raises(JobRefused, match="that is starting, or ending: run again when it says where"):
            served_endpoint(job, ARGS, None)
        assert served_endpoint(job, ARGS, "none") is None
    assert served_endpoint(job, ARGS, None) is None
