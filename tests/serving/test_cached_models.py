"""Engines load what the cache has, hold it, and say of it what they would say without a cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll_api.contract import CACHED_MODELS_VARIABLE
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.model_cache.locks import alone
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from kuberoll_workers.serving import cached_models
from kuberoll_workers.serving.cached_models import ModelGone, cached, hold_models
from tests.data.hub import Hub, serving_hub, variables
from tests.serving.hosts import starting, until_ready

COMMIT = "a" * 40


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the cache, of the hub and of a bucket."""
    made = tmp_path / "models" / "key" / COMMIT
    (made / "snapshots" / COMMIT).mkdir(parents=True)
    held = made / "manifest.json"
    held.touch()
    found = {"path": str(made / "snapshots" / COMMIT), "held": str(held)}
    listed = [{"source": name, **found} for name in ("me/tiny", "s3://bucket/tiny")]
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": [*listed, {"source": "me/words", **found, "tokenizer": True}]}))
    monkeypatch.setenv(CACHED_MODELS_VARIABLE, str(file))
    monkeypatch.setattr(cached_models, "_held", {})
    return made


def test_what_the_cache_has_is_found_and_held(entry: Path) -> None:
    with alone(entry / "manifest.json") as free:
        assert free
    assert cached("me/tiny") == str(entry / "snapshots" / COMMIT)
    assert cached("me/words", tokenizer=True) == cached("me/tiny")
    assert cached("me/words") is None
    assert cached("/models/mounted") is None
    with alone(entry / "manifest.json") as free:
        assert not free


def test_a_pod_holds_all_of_its_models(entry: Path) -> None:
    hold_models()
    with alone(entry / "manifest.json") as free:
        assert not free


def test_what_was_removed_is_fetched_by_the_engine(entry: Path) -> None:
    shutil.rmtree(entry)
    assert cached("me/tiny") is None
    with pytest.raises(ModelGone, match=r"s3://bucket/tiny: the model cache has removed it.*delete the pod"):
        cached("s3://bucket/tiny")


def test_without_a_cache_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHED_MODELS_VARIABLE, raising=False)
    assert cached("me/tiny") is None


def fill(tmp_path: Path, hub: Hub) -> Path:
    result = tmp_path / "filled.json"
    cache = tmp_path / "cache"
    own = ["--model=me/tiny", "--revision=main", f"--directory={cache}", f"--shown-at={cache}", f"--result={result}"]
    subprocess.run(
        [sys.executable, "-m", "kuberoll_workers.pods.models", *own], env=variables(hub, tmp_path / "home"), check=True
    )
    return result


@pytest.mark.engine
@pytest.mark.long
async def test_an_engine_with_a_cache_says_and_samples_what_it_would_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    request = GenerationRequest(
        request_id="r", session_id="s", token_ids=token_array([2, 5]), sampling=SamplingParameters(max_tokens=8, seed=1)
    )
    engine = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 27}
    found = []
    with serving_hub(tmp_path / "model") as hub:
        for name, value in variables(hub, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        hub.commit = COMMIT
        for with_cache in (False, True):
            if with_cache:
                monkeypatch.setenv(CACHED_MODELS_VARIABLE, str(fill(tmp_path, hub)))
                # A branch that has gone on since.
                hub.commit, hub.token = "b" * 40, "nobody has it"
                shutil.rmtree(tmp_path / "home")
            with starting(
                engine="VLLM", model="me/tiny", tokenizer="me/tiny", revision="main", engine_args=engine
            ) as host:
                ready = until_ready(host)[-1]
                async with ServeClient(ready["url"], limit=1, commit=COMMIT) as client:
                    result = await client.generate(request)
                    info = await client.info()
            found.append((info.model, info.commit, list(result.token_ids), list(result.logprobs)))
    assert found[0][:2] == ("me/tiny", COMMIT)
    assert found[0] == found[1]
    assert os.environ[CACHED_MODELS_VARIABLE]
