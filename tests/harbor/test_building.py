"""`kuberoll images build` with real builders: what is built, what is there already, and where images then are."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kuberoll_api.cli import main
from kuberoll_workers.harbor.builders import Builder, find_builder, has_written
from kuberoll_workers.harbor.images import builds_of, tagged
from kuberoll_workers.harbor.task import read_tasks
from tests.harbor.registry import running_registry
from tests.harbor.writing import STEPS_FILES, write_task

BUSYBOX = Path("/bin/busybox")
DOCKERFILE = """\
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "sh", "-c", "/bin/busybox mkdir /work && /bin/busybox echo made > /work/made"]
COPY text /work/text
WORKDIR /work
"""

pytestmark = pytest.mark.images


def is_static(program: Path) -> bool:
    """True for a program that needs no loader."""
    return program.is_file() and b"/ld-" not in program.read_bytes()[:4096]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store of buildah's and podman's own."""
    # Its layers hold files that only their owner may remove.
    with tempfile.TemporaryDirectory(prefix="kuberoll-store-", ignore_cleanup_errors=True) as directory:
        path = Path(directory)
        configuration = path / "storage.conf"
        configuration.write_text(f'[storage]\ndriver = "vfs"\nrunroot = "{path}/run"\ngraphroot = "{path}/graph"\n')
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(configuration))
        monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
        yield path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tasks with one Dockerfile's directory, one with another, and one without."""
    if not is_static(BUSYBOX):
        pytest.skip("busybox-static is not installed")
    for name, text in (("a", "same\n"), ("b", "same\n"), ("c", "other\n")):
        files = {"task.toml": "", "environment/Dockerfile": DOCKERFILE, "environment/text": text}
        root = write_task(tmp_path / "tasks" / name, changed=files)
        shutil.copy(BUSYBOX, root / "environment/busybox")
    write_task(tmp_path / "tasks/d", {**STEPS_FILES, "steps/check it/tests/Dockerfile": None})
    return tmp_path / "tasks"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["images", "build", *map(str, words)])


def outcomes(result: Result) -> dict[str, str]:
    """Outcome of each image in the table, by the first of its tasks."""
    lines = [line.split() for line in result.stdout.splitlines()[1:-1]]
    return {line[3]: line[1] for line in lines}


def options(builder: str) -> list[str]:
    return [
        "--builder",
        builder,
        "--option=--network=host",
        *(["--option=--isolation=chroot"] if builder == "podman" else []),
    ]


def configuration(layout: Path, reference: str) -> dict[str, Any]:
    """The configuration of an image in an OCI layout."""

    def blob(digest: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((layout / "blobs" / digest.replace(":", "/")).read_bytes())
        return content

    names = "org.opencontainers.image.ref.name"
    [entry] = [one for one in blob_index(layout) if one["annotations"][names] == reference]
    return blob(blob(entry["digest"])["config"]["digest"])


def blob_index(layout: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((layout / "index.json").read_bytes())["manifests"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_images_are_built_once_into_a_layout(builder: str, store: Path, folder: Path, tmp_path: Path) -> None:
    if shutil.which(builder) is None:
        pytest.skip(f"{builder} is not installed")
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    layout = tmp_path / "images/layout"
    given = (folder, "--tag", "registry.example/tasks", "--layout", layout, *options(builder))
    first = run(*given)
    assert first.exit_code == 0, first.output
    assert outcomes(first) == {"a": "built", "c": "built"}
    assert first.stdout.endswith("4 tasks, 2 images: 2 built\n")
    references = [tagged("registry.example/tasks", build.digest) for build in builds_of(read_tasks(folder))]
    assert all(has_written(layout, reference) for reference in references)
    assert configuration(layout, references[0])["config"]["WorkingDir"] == "/work"
    assert outcomes(run(*given)) == {"a": "there", "c": "there"}
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before

    (folder / "c/environment/text").write_text("changed\n")
    assert outcomes(run(*given)) == {"a": "there", "c": "built"}
    assert len(blob_index(layout)) == 3
    assert not has_written(tmp_path, references[0])


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_images_are_pushed_once(
    builder: str, store: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(builder) is None:
        pytest.skip(f"{builder} is not installed")
    with running_registry() as registry:
        configuration = tmp_path / ".config/containers/registries.conf"
        configuration.parent.mkdir(parents=True)
        configuration.write_text(f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n')
        monkeypatch.setenv("HOME", str(tmp_path))
        given = (folder, "--tag", f"{registry.address}/team/tasks", "--push", *options(builder))
        first = run(*given)
        assert first.exit_code == 0, first.output
        assert outcomes(first) == {"a": "built", "c": "built"}
        tags = {build.digest[:32] for build in builds_of(read_tasks(folder))}
        assert tags < registry.manifests.keys()
        blobs = len(registry.blobs)
        # Without skopeo buildah cannot ask, and pushes what its store has.
        asks = builder == "podman" or shutil.which("skopeo") is not None
        assert set(outcomes(run(*given)).values()) == {"there" if asks else "built"}
        assert len(registry.blobs) == blobs
        # Gone from the registry, and still in the builder's store: it is pushed again.
        del registry.manifests[min(tags)]
        assert sorted(outcomes(run(*given)).values()) == ["built", "there" if asks else "built"]
        assert tags < registry.manifests.keys()


@pytest.mark.slow
def test_a_build_that_fails_is_told_and_the_others_are_built(store: Path, folder: Path) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    (folder / "a/environment/Dockerfile").write_text("FROM scratch\nCOPY missing /\n")
    (folder / "b/environment/Dockerfile").write_text(DOCKERFILE + 'RUN ["/bin/busybox", "sleep", "600"]\n')
    (folder / "b/task.toml").write_text("[environment]\nbuild_timeout_sec = 2")
    result = run(folder, "--tag", "tasks", "--parallel", 3, *options("buildah"))
    assert result.exit_code == 1
    assert outcomes(result) == {"a": "broken", "b": "broken", "c": "built"}
    assert "a/environment: buildah build has failed with exit code" in result.stderr
    assert "b/environment: buildah build has not ended after 2 s (environment.build_timeout_sec)" in result.stderr
    # Without a registry or a layout the builder's own store has it.
    assert outcomes(run(folder / "c", "--tag", "tasks", *options("buildah"))) == {"c": "there"}


def test_tasks_with_images_of_their_own_need_none(folder: Path) -> None:
    assert find_builder(None, ()).name in ("docker", "podman", "buildah")
    result = run(folder / "d", "--tag", "tasks")
    assert (result.exit_code, result.stdout) == (0, "1 tasks, 0 images: none is to be built\n")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--tag", "tasks:1"], 2, "'tasks:1' is no name of an image without a tag"),
        (["--tag", "t", "--push", "--layout", "x"], 2, "--push and --layout exclude each other"),
        (["--tag", "t", "--builder", "docker", "--layout", "x"], 2, "docker adds nothing to an OCI layout"),
        ([], 2, "Missing option '--tag'"),
    ],
)
def test_what_cannot_be_done_is_refused_first(
    words: list[str], code: int, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docker").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(folder, *words)
    assert result.exit_code == code
    assert expected in result.stderr


def test_broken_tasks_and_missing_builders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a/task.toml").write_text("[environment]\ncpus = 0")
    result = run(folder, "--tag", "t")
    assert result.exit_code == 2
    assert "a/task.toml:2: environment.cpus: found 0; input should be greater than 0" in result.stderr
    monkeypatch.setenv("PATH", "")
    result = run(folder, "--tag", "t", "--builder", "podman")
    assert "podman cannot be found: install one of docker, podman, buildah" in result.stderr


def test_a_build_that_is_cancelled_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # A builder that starts a program of its own, which says that it is there and holds the pipe until it ends.
    program = tmp_path / "bin/buildah"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsh -c 'exec > {pipe}; echo; exec sleep 600'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    asyncio.run(_cancelled(pipe, tmp_path))


async def _cancelled(pipe: Path, directory: Path) -> None:
    task = asyncio.create_task(Builder(name="buildah").build(directory, "a:b", 600))
    reader = await asyncio.to_thread(pipe.open)
    with reader:
        await asyncio.to_thread(reader.readline)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(reader.read) == ""


def test_has_written_is_false_for_what_is_no_layout(tmp_path: Path) -> None:
    for text in ("", "[]", '{"manifests": 1}', '{"manifests": [{}]}', '{"manifests": [1]}'):
        (tmp_path / "index.json").write_text(text)
        assert not has_written(tmp_path, "a:b")
