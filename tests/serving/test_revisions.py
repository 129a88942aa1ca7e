"""A replica loads one commit of a branch, and says which; a run takes no other one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.client import OtherModel, ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from tests.data.hub import Hub, serving_hub, variables
from tests.serving.hosts import starting, until_ready

FIRST, SECOND = "a" * 40, "b" * 40


def pinned(hub: Hub, home: Path, **given: str | None) -> list[str]:
    fields = {"model": "me/tiny", "tokenizer": "me/tiny", "revision": None, "tokenizer_revision": None, **given}
    script = (
        "from kuberoll_workers.serving.engines.revisions import pinned_revisions\n"
        f"print(*pinned_revisions(**{fields!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=variables(hub, home)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_branch_is_resolved_once(tmp_path: Path) -> None:
    with serving_hub(tmp_path / "model") as hub:
        hub.commit = FIRST
        assert pinned(hub, tmp_path / "one") == [FIRST, "None", FIRST]
        hub.commit = SECOND
        assert pinned(hub, tmp_path / "two", revision="main") == [SECOND, "None", SECOND]
        # A commit stays what it is, and a tokenizer of its own has a branch of its own.
        assert pinned(hub, tmp_path / "one", revision=FIRST) == [FIRST, "None", FIRST]
        directory = str(tmp_path / "model")
        assert pinned(hub, tmp_path / "one", model=directory, revision="main") == ["main", SECOND, "None"]
        assert pinned(hub, tmp_path / "one", tokenizer=directory, revision=FIRST) == [FIRST, "None", FIRST]
        assert pinned(hub, tmp_path / "one", model="me/other", revision="main") == ["main", SECOND, "None"]
    assert not [name for name in hub.asked if name.endswith(".safetensors")]


@pytest.mark.engine
async def test_a_replica_that_starts_after_a_push_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    request = GenerationRequest(
        request_id="r", session_id="s", token_ids=token_array([2, 5]), sampling=SamplingParameters(max_tokens=2)
    )
    engine = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 27}
    with serving_hub(tmp_path / "model") as hub:
        for name, value in variables(hub, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        hub.commit = SECOND
        with starting(engine="VLLM", model="me/tiny", tokenizer="me/tiny", revision="main", engine_args=engine) as host:
            events = until_ready(host)
            # Another push, while it serves.
            hub.commit = "c" * 40
            assert events[-1]["info"]["commit"] == SECOND
            url = events[-1]["url"]
            async with ServeClient(url, limit=1, commit=SECOND) as client:
                assert len((await client.generate(request)).token_ids)
            # A run that began before the push.
            async with ServeClient(url, limit=1, commit=FIRST) as client:
                for call in (client.generate(request), client.check_health(), client.info()):
                    with pytest.raises(OtherModel, match=f"commit {SECOND} .* began with {FIRST}"):
                        await call
