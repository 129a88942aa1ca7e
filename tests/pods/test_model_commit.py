"""Workers know the commit of a hub's model, also where its tokenizer is another one, and stay with the run's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kuberoll_api.contract import PodConfig, WorkerMessage
from kuberoll_workers.output.run_directory import new_manifest
from kuberoll_workers.pods.worker import ShardPod
from tests.data.hub import Hub, serving_hub, variables
from tests.pods.test_contract import job

pytestmark = pytest.mark.slow

_SCRIPT = """
import json, sys
import msgspec
from kuberoll_api.contract import PodConfig
from kuberoll_workers.output.run_directory import RunManifest
from kuberoll_workers.pods.worker import ShardPod

job, earlier = json.loads(sys.argv[1])
pod = ShardPod(PodConfig(job=job, base="/", endpoint="http://x", shard_count=1, output="/"), 0)
print(json.dumps(pod._find_sources(None if earlier is None else msgspec.convert(earlier, RunManifest))))
"""


def sources(hub: Hub, home: Path, model: dict[str, str], earlier: dict[str, str] | None = None) -> dict[str, str]:
    document = job(source={"uri": "rows.jsonl"}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["generation"]["model"] = model
    began = None
    if earlier is not None:
        made = new_manifest(
            type(job(source={"uri": "rows.jsonl"})).model_validate(document), shards=1, inputs={}, sources=earlier
        )
        began = {name: getattr(made, name) for name in made.__slots__}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([document, began])],
        capture_output=True, text=True, check=False, env=variables(hub, home),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_model_s_commit_is_known_without_its_weights(tmp_path: Path) -> None:
    with serving_hub(tmp_path / "model") as hub:
        hub.commit = "a" * 40
        here = {"source": "me/tiny", "tokenizer": str(tmp_path / "model"), "revision": "main"}
        found = sources(hub, tmp_path / "one", here)
        assert found["model"] == f"commit {'a' * 40}"
        assert not found["tokenizer"].startswith("commit")
        # A pod of another machine, after a push.
        hub.commit = "b" * 40
        assert sources(hub, tmp_path / "two", here, found)["model"] == found["model"]
        assert sources(hub, tmp_path / "three", here)["model"] == f"commit {'b' * 40}"
        assert sources(hub, tmp_path / "four", {"source": "me/tiny"}) == dict.fromkeys(
            ("model", "tokenizer"), f"commit {'b' * 40}"
        )
        # Its files are in other pods.
        assert "model" not in sources(hub, tmp_path / "five", {"source": str(tmp_path / "model")})
    assert "model.safetensors" not in hub.asked


@pytest.mark.parametrize(("directory", "said"), [("a" * 40, "a" * 40), ("main", None), (None, None)])
def test_the_check_tells_the_operator_the_commit(directory: str | None, said: str | None) -> None:
    given = job(source={"uri": "rows.jsonl"})
    document = given.model_dump(mode="json", by_alias=True, exclude_unset=True)
    pod = ShardPod(PodConfig(job=document, base="/", endpoint="http://x", shard_count=1, output="/"), 0)
    named = {} if directory is None else {"model": f"commit {directory}"}
    pod._manifest = new_manifest(given, shards=1, inputs={}, sources=named)
    message = TypeAdapter(WorkerMessage).validate_json(pod.message(""))
    assert message.commit == said
