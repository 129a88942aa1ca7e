"""The container that fetches a model into the cache: real processes, a real directory, and a hub that counts."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.contract import EXIT_FAILED, EXIT_REFUSED, MODEL_VARIABLES, CachedModels, PodConfig
from kuberoll_workers.data.model_cache.locks import hold
from kuberoll_workers.data.model_cache.store import GRACE_SECONDS, MANIFEST
from kuberoll_workers.pods.files import ConfigRefused
from kuberoll_workers.pods.models import take_given
from kuberoll_workers.pods.worker import ShardPod, check_model_path
from tests.data.hub import TINY, Hub, serving_hub, variables
from tests.output.s3 import S3Server, s3, s3_server
from tests.pods.test_contract import job

__all__ = ["s3", "s3_server"]

pytestmark = pytest.mark.processes

MODULE = "kuberoll_workers.pods.models"
FILES = sorted(path.name for path in TINY.iterdir())
SIZE = sum(path.stat().st_size for path in TINY.iterdir())
FIRST, SECOND, THIRD = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving_hub(tmp_path / "hub") as server:
        yield server


class Filling:
    """One run of the container's program."""

    def __init__(self, tmp_path: Path, environment: dict[str, str], *arguments: str, limit: int | None = None) -> None:
        self.cache = tmp_path / "cache"
        self._result = tmp_path / f"result-{time.monotonic_ns()}.json"
        self._message = self._result.with_suffix(".message")
        own = [f"--directory={self.cache}", f"--shown-at={self.cache}", f"--result={self._result}", "--node=one"]
        command = [sys.executable, "-m", MODULE, *own, *arguments]
        # Files stop in the middle for longer than the hub's client waits by itself before it asks for the rest.
        patience = {"HF_HUB_DOWNLOAD_TIMEOUT": "300"}
        variables = {**environment, **patience, "KUBEROLL_TERMINATION_LOG": str(self._message)}

        def bound() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        self.process = subprocess.Popen(
            command, env=variables, stderr=subprocess.PIPE, text=True, preexec_fn=bound if limit else None
        )
        self.log = ""

    def until_says(self, words: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if words in line:
                return
        raise AssertionError(f"it ended without {words!r}: {self.log}")

    def end(self) -> int:
        self.log += self.process.communicate(timeout=120)[1]
        return self.process.returncode

    @property
    def message(self) -> str:
        return self._message.read_text()

    @property
    def path(self) -> Path:
        """Where the model is."""
        return Path(self.models.models[0].path)

    @property
    def models(self) -> CachedModels:
        import msgspec

        return msgspec.json.decode(self._result.read_bytes(), type=CachedModels)


def fill(tmp_path: Path, hub: Hub, *arguments: str, limit: int | None = None, **more: str) -> Filling:
    """A run that has ended."""
    given = {**variables(hub, tmp_path / "home"), **more}
    filling = Filling(tmp_path, given, "--model=me/tiny", *arguments, limit=limit)
    filling.end()
    return filling


def whole(tmp_path: Path) -> list[str]:
    """The commits that the cache has."""
    return sorted(path.parent.name for path in (tmp_path / "cache").glob(f"models/*/*/{MANIFEST}"))


def manifest(tmp_path: Path, commit: str) -> Path:
    [found] = (tmp_path / "cache").glob(f"models/*/{commit}/{MANIFEST}")
    return found


def used_long_ago(tmp_path: Path, commit: str, *, order: int = 0) -> None:
    before = time.time() - 2 * GRACE_SECONDS + order
    os.utime(manifest(tmp_path, commit), (before, before))


def test_a_model_is_fetched_once_and_is_what_the_hub_has(tmp_path: Path, hub: Hub) -> None:
    hub.commit = FIRST
    first = fill(tmp_path, hub, "--revision=main")
    assert first.process.returncode == 0, first.log
    assert sorted(hub.asked) == FILES
    # As in the hub's own cache, so that a run knows the commit.
    assert first.path.name == FIRST
    assert first.path.parent.name == "snapshots"
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == {
        path.name: path.read_bytes() for path in TINY.iterdir()
    }
    second = fill(tmp_path, hub, f"--revision={FIRST}")
    assert second.path == first.path
    assert hub.sent == SIZE
    assert not list((tmp_path / "cache" / "parts").iterdir())
    # A push is another model.
    hub.commit = SECOND
    assert fill(tmp_path, hub, "--revision=main").path.name == SECOND
    assert whole(tmp_path) == [FIRST, SECOND]


def test_of_two_at_once_one_fetches_and_the_other_waits(tmp_path: Path, hub: Hub) -> None:
    hub.held.clear()
    given = variables(hub, tmp_path / "home")
    one = Filling(tmp_path, given, "--model=me/tiny", "--revision=main")
    assert hub.halfway.wait(120)
    other = Filling(tmp_path, given, "--model=me/tiny", "--revision=main")
    other.until_says("another pod fetches it; waiting")
    assert not whole(tmp_path)
    hub.held.set()
    assert (one.end(), other.end()) == (0, 0)
    assert one.path == other.path
    assert sorted(hub.asked) == FILES


def test_what_was_killed_in_the_middle_is_no_model_and_is_gone_on_with(tmp_path: Path, hub: Hub) -> None:
    hub.held.clear()
    killed = Filling(tmp_path, variables(hub, tmp_path / "home"), "--model=me/tiny")
    assert hub.halfway.wait(120)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.end() == -signal.SIGKILL
    assert not whole(tmp_path)
    hub.held.set()
    small = [name for name in hub.asked if name != "model.safetensors"]
    again = fill(tmp_path, hub)
    assert again.process.returncode == 0, again.log
    assert (again.path / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    # What was there is not fetched again.
    assert [name for name in hub.asked if name != "model.safetensors"].count(small[0]) == 1


def test_files_with_another_digest_than_the_hub_states_are_no_model(tmp_path: Path, hub: Hub) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.false_digests = {name}
        filling = fill(tmp_path, hub)
        assert filling.process.returncode == EXIT_FAILED
        assert f"{name} has the " in filling.message
        assert "its origin says" in filling.message
        assert not whole(tmp_path)
    hub.false_digests = set()
    assert fill(tmp_path, hub).process.returncode == 0


def _shorten(files: Path, description: Path) -> None:
    (files / "model.safetensors").write_bytes(b"short")


def _remove(files: Path, description: Path) -> None:
    (files / "tokenizer.json").unlink()


def _flip(files: Path, description: Path) -> None:
    data = bytearray((files / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (files / "model.safetensors").write_bytes(data)


def _forge(files: Path, description: Path) -> None:
    _flip(files, description)
    found = json.loads(description.read_bytes())
    for file in found["files"]:
        file["sha256"] = "0" * 64
    description.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("damage", "arguments"),
    [(_shorten, []), (_remove, []), (_flip, ["--digests"]), (_forge, [])],
    ids=["shorter", "missing", "changed", "forged"],
)
def test_what_is_damaged_is_fetched_again(
    damage: Callable[[Path, Path], None], arguments: list[str], tmp_path: Path, hub: Hub
) -> None:
    hub.commit = FIRST
    path = fill(tmp_path, hub).path
    damage(path, manifest(tmp_path, FIRST))
    again = fill(tmp_path, hub, *arguments)
    assert again.process.returncode == 0, again.log
    assert "is fetched again" in again.log
    assert {item.name: item.read_bytes() for item in path.iterdir()} == {
        item.name: item.read_bytes() for item in TINY.iterdir()
    }


def test_the_least_recently_used_is_removed_and_what_is_used_stays(tmp_path: Path, hub: Hub) -> None:
    for order, commit in enumerate((FIRST, SECOND)):
        assert fill(tmp_path, hub, f"--revision={commit}").process.returncode == 0
        used_long_ago(tmp_path, commit, order=order)
    bound = f"--size={SIZE * 5 // 2}"
    # An engine has the first one, and may load it again.
    held = hold(manifest(tmp_path, FIRST))
    assert held is not None
    third = fill(tmp_path, hub, f"--revision={THIRD}", bound)
    assert third.process.returncode == 0, third.log
    assert whole(tmp_path) == [FIRST, THIRD]
    held.close()
    # It counts as used until then.
    used_long_ago(tmp_path, THIRD)
    assert fill(tmp_path, hub, f"--revision={SECOND}", bound).process.returncode == 0
    assert whole(tmp_path) == [FIRST, SECOND]


def test_what_is_about_to_be_used_is_not_removed(tmp_path: Path, hub: Hub) -> None:
    assert fill(tmp_path, hub, f"--revision={FIRST}").process.returncode == 0
    refused = fill(tmp_path, hub, f"--revision={SECOND}", f"--size={SIZE * 3 // 2}")
    assert refused.process.returncode == EXIT_FAILED
    assert "no room for model me/tiny: it needs 1.8 MiB" in refused.message
    assert str(tmp_path / "cache") in refused.message
    assert whole(tmp_path) == [FIRST]
    # What is in the cache needs no room.
    assert fill(tmp_path, hub, f"--revision={FIRST}", f"--size={SIZE * 3 // 2}").process.returncode == 0


def test_a_model_that_is_larger_than_the_cache_is_refused(tmp_path: Path, hub: Hub) -> None:
    filling = fill(tmp_path, hub, f"--size={SIZE - 1}")
    assert filling.process.returncode == EXIT_REFUSED
    assert "raise jobs.modelCache.size of the chart, or set model.cache: false" in filling.message
    assert not hub.asked


def test_a_disk_that_gets_full_has_nothing_left_of_the_model(tmp_path: Path, hub: Hub) -> None:
    # A file that may not grow any more, as on a disk that others have filled meanwhile.
    filling = fill(tmp_path, hub, limit=SIZE // 2)
    assert filling.process.returncode == EXIT_FAILED
    assert f"{tmp_path / 'cache'} is full: me/tiny needs 1.8 MiB" in filling.message
    assert not whole(tmp_path)
    assert not list((tmp_path / "cache" / "parts").iterdir())
    assert fill(tmp_path, hub).process.returncode == 0


def test_what_cannot_be_had_is_refused_with_the_reason(tmp_path: Path, hub: Hub) -> None:
    place = f"http://127.0.0.1:{hub.server_port}"
    filling = fill(tmp_path, hub, "--revision=v9")
    assert filling.process.returncode == EXIT_REFUSED
    assert filling.message == f"model me/tiny: there is no revision 'v9' at {place} (404)"
    other = Filling(tmp_path, variables(hub, tmp_path / "home"), "--model=me/other")
    assert other.end() == EXIT_REFUSED
    assert other.message.startswith(f"model me/other does not exist at {place}, or this job may not read it")


def test_a_job_that_may_not_read_a_model_does_not_get_it_from_the_cache(tmp_path: Path, hub: Hub) -> None:
    hub.token = "hf_of_a_test"
    # As the operator passes what comes of envFrom.
    assert fill(tmp_path, hub, KUBEROLL_GIVEN_HF_TOKEN=hub.token).process.returncode == 0
    refused = fill(tmp_path, hub)
    assert refused.process.returncode == EXIT_REFUSED
    assert "may not read it" in refused.message
    assert hub.token not in refused.log + "".join(
        path.read_text() for path in (tmp_path / "cache").rglob("*.json") if path.name == MANIFEST
    )


def test_what_is_cached_is_used_while_the_hub_does_not_answer(tmp_path: Path, hub: Hub) -> None:
    hub.commit = FIRST
    assert fill(tmp_path, hub, "--revision=main").process.returncode == 0
    asked = hub.sent
    for arguments in ([f"--revision={FIRST}"], ["--revision=main"]):
        offline = fill(tmp_path, hub, *arguments, HF_HUB_OFFLINE="1")
        assert offline.process.returncode == 0, offline.log
        assert offline.path.name == FIRST
    missing = fill(tmp_path, hub, f"--revision={SECOND}", HF_HUB_OFFLINE="1")
    assert missing.process.returncode == EXIT_FAILED
    assert "and the cache does not have it" in missing.message
    assert hub.sent == asked


def test_another_server_has_other_models(tmp_path: Path, hub: Hub) -> None:
    assert fill(tmp_path, hub).process.returncode == 0
    # What somebody's own server calls me/tiny is nothing for others.
    foreign = fill(tmp_path, hub, HF_ENDPOINT=f"http://localhost:{hub.server_port}")
    assert foreign.process.returncode == 0, foreign.log
    assert hub.sent == 2 * SIZE


def test_a_tokenizer_of_its_own_comes_without_weights(tmp_path: Path, hub: Hub) -> None:
    hub.commit = FIRST
    filling = Filling(tmp_path, variables(hub, tmp_path / "home"), "--tokenizer=me/tiny")
    assert filling.end() == 0, filling.log
    [found] = filling.models.models
    assert found.tokenizer
    assert "tokenizer.json" in hub.asked
    assert "model.safetensors" not in hub.asked


def test_a_model_of_a_bucket(tmp_path: Path, s3: tuple[S3Server, str]) -> None:
    import fsspec

    _, bucket = s3
    uri = f"{bucket}/models/tiny"
    store = fsspec.filesystem("s3")
    for path in TINY.iterdir():
        store.put_file(str(path), f"{uri}/{path.name}")
    store.pipe_file(f"{uri}/optimizer.pt", b"a trainer's own")

    def obtain(model: str = uri) -> Filling:
        filling = Filling(tmp_path, dict(os.environ), f"--model={model}/")
        filling.end()
        return filling

    first = obtain()
    assert first.process.returncode == 0, first.log
    assert sorted(path.name for path in first.path.iterdir()) == FILES
    # It is no commit of a hub.
    assert first.path.parent.name == "contents"
    kept = json.loads((first.path.parent.parent / MANIFEST).read_bytes())
    assert {file["algorithm"] for file in kept["files"]} == {"md5"}
    assert obtain().path == first.path
    store.pipe_file(f"{uri}/config.json", (TINY / "config.json").read_bytes() + b"\n")
    assert obtain().path != first.path
    missing = obtain(f"{bucket}/models/none")
    assert missing.process.returncode == EXIT_REFUSED
    assert "there are no files of a model" in missing.message


def test_workers_read_the_tokenizer_of_a_bucket(s3: tuple[S3Server, str]) -> None:
    import fsspec

    _, bucket = s3
    store = fsspec.filesystem("s3")
    for path in TINY.iterdir():
        store.put_file(str(path), f"{bucket}/tiny/{path.name}")

    def sources(model: str) -> tuple[ShardPod, dict[str, str]]:
        document = job(source={"uri": "rows.jsonl"}).model_dump(mode="json", by_alias=True, exclude_unset=True)
        document["spec"]["generation"]["model"] = {"source": model}
        pod = ShardPod(PodConfig(job=document, base="/", endpoint="http://x", shard_count=1, output="/"), 0)
        check_model_path(model)
        pod._copy_tokenizer()
        return pod, pod._find_sources(None)

    pod, found = sources(f"{bucket}/tiny")
    # It is the one of the same files elsewhere: a run may go on with either.
    assert found == sources(str(TINY))[1]
    assert not (Path(pod._tokenizer) / "model.safetensors").exists()
    with pytest.raises(ConfigRefused, match=r"spec\.generation\.model: .* there are no files of a model"):
        sources(f"{bucket}/none")
    with pytest.raises(ConfigRefused, match="workers load tokenizers from directories, the hub, s3:// or gs://"):
        check_model_path("az://models/tiny")


@pytest.mark.parametrize("name", sorted(MODEL_VARIABLES))
def test_variables_that_are_taken(name: str) -> None:
    given: dict[str, Any] = {f"KUBEROLL_GIVEN_{name}": "theirs", "KUBEROLL_GIVEN_LD_PRELOAD": "/code.so"}
    take_given(given)
    assert given == {name: "theirs"}
    own = {f"KUBEROLL_GIVEN_{name}": "theirs", name: "own"}
    take_given(own)
    assert own == {name: "own"}


def test_no_variable_has_python_run_code_or_trust_another_server() -> None:
    assert not MODEL_VARIABLES & {"PYTHONPATH", "LD_PRELOAD", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY"}
    assert not [name for name in MODEL_VARIABLES if name.startswith(("PYTHON", "LD_", "SSL_"))]
