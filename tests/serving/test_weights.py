"""Weights on their way to an engine: fetched once, checked before, tried until they can be used."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.contract import WeightsSource, user_config
from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationRequest, PolicyUnavailable, SamplingParameters
from kuberoll_workers.serving.engines.checkpoint import mismatch
from kuberoll_workers.serving.engines.fetching import fetch, wanted_files
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.simulated import Simulated, version_spans
from kuberoll_workers.serving.weights import LiveWeights, configured_weights

PATIENCE_SECONDS = 240


@pytest.fixture
def bucket() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}/step-1"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def put(uri: str, **files: bytes) -> None:
    for name, data in files.items():
        with fsspec.open(f"{uri}/{name.replace('__', '/').replace('_', '.')}", "wb") as file:
            file.write(data)


def test_a_uri_becomes_a_directory_once(bucket: str, tmp_path: Path) -> None:
    put(bucket, model_safetensors=b"1", config_json=b"{}", optimizer_pt=b"large", deeper__model_safetensors=b"2")
    with ThreadPoolExecutor(8) as pool:
        (path,) = {*pool.map(lambda _: fetch(bucket, "1", tmp_path), range(16))}
    assert {file.name for file in path.iterdir()} == {"model.safetensors", "config.json"}
    assert (path / "model.safetensors").read_bytes() == b"1"
    # The same place may hold other weights later, under another version.
    put(bucket, model_safetensors=b"3")
    assert (fetch(bucket, "1", tmp_path) / "model.safetensors").read_bytes() == b"1"
    assert (fetch(bucket, "2", tmp_path) / "model.safetensors").read_bytes() == b"3"


def test_old_copies_go(bucket: str, tmp_path: Path) -> None:
    put(bucket, model_safetensors=b"1")
    paths = [fetch(bucket, str(version), tmp_path) for version in range(4)]
    assert [path.is_dir() for path in paths] == [False, False, True, True]


def test_what_is_not_there_is_refused_and_leaves_nothing(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match=bucket):
        fetch(bucket, "1", tmp_path)
    put(bucket, README_md=b"soon")
    with pytest.raises(WeightsRefused, match="has no weights"):
        fetch(bucket, "1", tmp_path)
    with pytest.raises(WeightsRefused, match="nosuch"):
        fetch("nosuch://bucket/step-1", "1", tmp_path)
    with pytest.raises(WeightsRefused, match="is not a directory"):
        fetch(str(tmp_path / "nowhere"), "1")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    put(bucket, model_safetensors=b"1")
    assert fetch(bucket, "1", tmp_path).is_dir()


def test_a_machine_without_room_refuses_and_breaks_nothing(bucket: str, tmp_path: Path) -> None:
    put(bucket, model_safetensors=b"1")
    (tmp_path / "file").write_bytes(b"")
    # Any other error would be one of the engine: the replica would be replaced, and the weights be withdrawn.
    with pytest.raises(WeightsRefused, match="cannot be read: FileExistsError"):
        fetch(bucket, "1", tmp_path / "file")


def test_local_directories_are_as_they_are(tmp_path: Path) -> None:
    assert fetch(str(tmp_path), "1") == fetch(f"file://{tmp_path}", "1") == tmp_path


def test_formats_that_older_trainers_write() -> None:
    assert wanted_files(["a/config.json", "a/pytorch_model.bin"]) == ["a/pytorch_model.bin", "a/config.json"]
    assert wanted_files(["a/config.json"]) == []


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ({"a": (2, 3), "b": (4,)}, None),
        ({"a": (2, 3), "b": (4,), "more": (1,)}, None),
        ({"a": (3, 2), "b": (4,)}, "a has the shape (3, 2), but (2, 3) in the model"),
        ({"a": (2, 3)}, "b is missing"),
        # Of another scheme of names, which only the engine knows.
        ({"model.a": (9,)}, None),
    ],
)
def test_tensors_that_are_not_the_model_s(new: dict[str, tuple[int, ...]], why: str | None) -> None:
    assert mismatch(new, {"a": (2, 3), "b": (4,), "lm_head.weight": (5, 3)}) == why


@pytest.mark.parametrize("more", ["mtp.fc.weight", "model.mtp.0.x", "model.mtp_layers.0.x", "model.layers.2.mlp.x"])
def test_layers_that_predict_further_tokens_are_not_missed(more: str) -> None:
    own = {"model.layers.1.x": (1,), "model.layers.2.eh_proj.weight": (1,), "model.layers.20.x": (1,), more: (1,)}
    assert mismatch({"model.layers.1.x": (1,), "model.layers.20.x": (1,)}, own) is None
    assert mismatch({"model.layers.20.x": (1,)}, own) == "model.layers.1.x is missing"
    assert mismatch({"model.layers.1.x": (1,)}, own) == "model.layers.20.x is missing"


class Reading(Simulated):
    """Reads its weights, and breaks on those that are called so."""

    def __init__(self) -> None:
        super().__init__(model="none", tokenizer="none", settings=SimulatedEngine(), engine_args={})
        self.loads: list[str] = []

    async def load_weights(self, uri: str | None, version: str) -> None:
        self.loads.append(version)
        if version == "broken":
            raise PolicyUnavailable("half of them are loaded")
        if uri is not None:
            fetch(uri, version)
        await super().load_weights(uri, version)


def weights(path: Path, version: str) -> WeightsSource:
    return WeightsSource(uri=str(path), version=version)


async def until_served(live: LiveWeights, version: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while live.served_version != version or live.problem is not None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def test_a_new_replica_serves_what_is_wanted_or_nothing(tmp_path: Path) -> None:
    live = LiveWeights(Reading())
    await live.load_initial(None)
    assert live.served_version == "0"
    await live.load_initial(weights(tmp_path, "1"))
    assert live.served_version == "1"
    with pytest.raises(WeightsRefused):
        await live.load_initial(weights(tmp_path / "nowhere", "2"))


async def test_weights_that_come_late_are_served_when_they_are_there(tmp_path: Path) -> None:
    live = LiveWeights(Reading(), first_wait=0.01)
    late = tmp_path / "late"
    live.set_wanted(weights(late, "1"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while live.problem is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert live.served_version == "0"
    assert str(late) in live.problem
    late.mkdir()
    await until_served(live, "1")


async def test_the_newest_that_is_wanted_wins_at_once(tmp_path: Path) -> None:
    engine = Reading()
    live = LiveWeights(engine, first_wait=600)
    live.set_wanted(weights(tmp_path / "nowhere", "1"))
    await asyncio.sleep(0)
    # Without waiting for the next try of the other.
    live.set_wanted(weights(tmp_path, "2"))
    await until_served(live, "2")
    live.set_wanted(weights(tmp_path, "2"))
    live.set_wanted(None)
    await until_served(live, "0")
    assert engine.loads == ["1", "2", "0"]
    await live.stop()


async def test_a_broken_engine_is_not_tried_again(tmp_path: Path) -> None:
    engine = Reading()
    live = LiveWeights(engine, first_wait=0.0)
    live.set_wanted(weights(tmp_path, "broken"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while live.problem is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert engine.loads == ["broken"]
    await live.stop()


async def test_a_version_that_changes_in_the_middle_of_a_simulated_response() -> None:
    engine = Simulated(
        model="none",
        tokenizer="none",
        settings=SimulatedEngine.model_validate({"firstTokenSeconds": 0.3, "sigma": 0, "meanTokens": 1000}),
        engine_args={},
    )
    request = GenerationRequest(
        request_id="r", session_id="s", token_ids=token_array([1]), sampling=SamplingParameters(max_tokens=100, seed=1)
    )
    task = asyncio.create_task(engine.generate(request))
    while not engine.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await engine.load_weights(None, "1")
    result = await task
    assert result.policy_versions[-1] == ("1", result.policy_versions[-1][1], len(result.token_ids))
    assert result.token_ids == (await engine.generate(request)).token_ids


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=6).map(sorted),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(0, 50),
)
def test_spans_cover_all_tokens_in_order(changes: list[float], one: float, other: float, tokens: int) -> None:
    versions = [(moment, str(number)) for number, moment in enumerate(changes)]
    spans = version_spans(versions, min(one, other), max(one, other), tokens)
    ends = [0, *(end for _, _, end in spans)]
    assert [start for _, start, _ in spans] == ends[:-1]
    assert ends[-1] == tokens
    assert all(start < end for _, start, end in spans)
    assert [name for name, _, _ in spans] == sorted(name for name, _, _ in spans)


@pytest.mark.parametrize("given_weights", [None, WeightsSource(uri="s3://b/w", version="1")])
def test_weights_survive_serve_s_configuration(given_weights: WeightsSource | None) -> None:
    assert configured_weights(user_config(given_weights)) == given_weights
    nothing: dict[str, Any] = {}
    assert configured_weights(nothing) is None
