"""Parts of the driver of containers that need no engine: what is asked of one, and what is made of its words."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fcntl
import io
import json
import os
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.lifetime import RUN_SCRATCH_VARIABLE
from kuberoll_workers.sandboxes.containers import body, driver, engine, images, output, owners, sockets
from kuberoll_workers.sandboxes.containers.driver import create_container
from kuberoll_workers.sandboxes.containers.engine import Engine
from kuberoll_workers.sandboxes.containers.images import EngineImage
from kuberoll_workers.sandboxes.containers.owners import Owner
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.guest.settings import VARIABLE, Settings
from kuberoll_workers.sandboxes.images.layouts import LayoutSource
from kuberoll_workers.sandboxes.images.references import LayoutReference, parse
from kuberoll_workers.sandboxes.runtime import PLACE, Runtime
from tests.sandboxes.layouts import write_layout

KERNEL = os.uname().release
MACHINE = os.uname().machine
# What Debian's Docker and Podman said, less what nobody reads.
DOCKER: dict[str, dict[str, Any]] = {
    "version": {
        "Components": [
            {"Name": "Engine", "Version": "20.10.24+dfsg1"},
            {"Name": "containerd", "Version": "1.6.20~ds1"},
        ],
        "Version": "20.10.24+dfsg1",
        "ApiVersion": "1.41",
        "Os": "linux",
        "Arch": "amd64",
    },
    "info": {
        "MemoryLimit": True,
        "CpuCfsQuota": True,
        "PidsLimit": True,
        "NCPU": 2,
        "OSType": "linux",
        "Architecture": MACHINE,
        "KernelVersion": KERNEL,
        "CgroupVersion": "1",
        "SecurityOptions": ["name=seccomp,profile=default"],
    },
}
PODMAN: dict[str, dict[str, Any]] = {
    "version": {
        "Components": [{"Name": "Podman Engine", "Version": "4.3.1"}, {"Name": "Conmon", "Version": "2.1.6"}],
        "Version": "4.3.1",
        "ApiVersion": "1.41",
        "Os": "linux",
        "Arch": "amd64",
    },
    "info": {
        **DOCKER["info"],
        "Architecture": {"x86_64": "amd64", "aarch64": "arm64"}[MACHINE],
        "Rootless": False,
    },
}
ENGINE = Engine(
    url="unix:///engine.sock",
    name="Docker 28.0",
    podman=False,
    cpus=4,
    limits=frozenset({"memory", "cpus", "processes"}),
    labels_files=False,
)
IMAGE = EngineImage(id="sha256:1", environment={"PATH": "/bin"}, user="app", workdir="/srv", checks_health=False)
RUNTIME = Runtime(Path("/cache/runtime"))
HERE = Owner("boot", 1, 10, 100)


def made(spec: SandboxSpec, image: EngineImage = IMAGE, engine: Engine = ENGINE, **fields: Any) -> dict[str, Any]:
    settings = body.settings_of("name", spec, image, "certificate")
    given = {"shared": Path("/run/name.d"), "labels": {"a": "b"}, "limits_storage": True, **fields}
    return body.body_of(spec, settings, engine=engine, image=image, runtime=RUNTIME, **given)


# The engine.


def test_an_engine_is_looked_for_where_it_is_as_a_rule() -> None:
    assert engine.urls({"DOCKER_HOST": "unix:///mine.sock", "XDG_RUNTIME_DIR": "/run/user/1"}) == ["unix:///mine.sock"]
    assert engine.urls({"XDG_RUNTIME_DIR": "/run/user/1"}) == [
        "unix:///var/run/docker.sock",
        "unix:///run/user/1/docker.sock",
        "unix:///run/user/1/podman/podman.sock",
        "unix:///run/podman/podman.sock",
    ]
    assert len(engine.urls({})) == 2


@pytest.mark.parametrize("url", ["tcp://10.0.0.1:2375", "ssh://somebody@there", "npipe:////./pipe/docker_engine"])
def test_an_engine_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(SandboxUnavailable, match=f"DOCKER_HOST is {url}.*unset it"):
        engine.urls({"DOCKER_HOST": url})


def test_engines_say_what_they_are() -> None:
    docker = engine.describe("unix:///d", DOCKER["version"], DOCKER["info"], KERNEL)
    assert (docker.name, docker.podman, docker.cpus) == ("Docker 20.10.24+dfsg1", False, 2)
    assert docker.limits == {"memory", "cpus", "processes"}
    podman = engine.describe("unix:///p", PODMAN["version"], PODMAN["info"], KERNEL)
    assert (podman.name, podman.podman, podman.labels_files) == ("Podman 4.3.1", True, False)


@pytest.mark.parametrize(
    ("info", "limits", "labels"),
    [
        ({"MemoryLimit": False}, {"cpus", "processes"}, False),
        ({"Rootless": True}, set(), False),
        ({"SecurityOptions": ["name=rootless"]}, set(), False),
        ({"SecurityOptions": ["name=rootless"], "CgroupVersion": "2"}, {"memory", "cpus", "processes"}, False),
        ({"SecurityOptions": ["name=selinux"]}, {"memory", "cpus", "processes"}, True),
    ],
)
def test_what_an_engine_cannot_limit_is_known(info: dict[str, Any], limits: set[str], labels: bool) -> None:
    found = engine.describe("unix:///d", DOCKER["version"], {**DOCKER["info"], **info}, KERNEL)
    assert ({*found.limits}, found.labels_files) == (limits, labels)


@pytest.mark.parametrize(
    ("of", "part", "change", "said"),
    [
        (DOCKER, "info", {"KernelVersion": "6.10.14-linuxkit"}, "in another machine.*Docker Desktop.*install"),
        (DOCKER, "info", {"OSType": "windows"}, "switch it to Linux containers"),
        (DOCKER, "info", {"Architecture": "riscv64"}, "use a Python for riscv64"),
        (DOCKER, "version", {"Os": "windows"}, "switch it to Linux containers"),
        (DOCKER, "version", {"ApiVersion": "1.40"}, "too old: API 1.41 .* since 20.10"),
        (DOCKER, "version", {"ApiVersion": "nonsense"}, "too old"),
        (PODMAN, "version", {"Version": "3.4.4"}, "Podman 4 or later"),
    ],
)
def test_an_engine_that_is_of_no_use_is_refused(of: dict[str, Any], part: str, change: Any, said: str) -> None:
    words = copy.deepcopy(of)
    words[part].update(change)
    with pytest.raises(SandboxUnavailable, match=said):
        engine.describe("unix:///d", words["version"], words["info"], KERNEL)


def test_without_an_engine_the_way_to_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"there is no such socket\): install Docker .*, or Podman"):
        engine.open_engine({"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale.sock"))
    stale.close()
    with pytest.raises(SandboxUnavailable, match="nobody listens there any more"):
        engine.open_engine({"DOCKER_HOST": f"unix://{tmp_path}/stale.sock"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else for a while")
def test_who_may_not_use_an_engine_is_told_the_group() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, socket.socket(socket.AF_UNIX) as end:
        place = Path(name)
        place.chmod(0o755)
        end.bind(str(place / "engine.sock"))
        (place / "engine.sock").chmod(0o600)
        end.listen()
        os.seteuid(65534)
        try:
            with pytest.raises(SandboxUnavailable, match=r"Permission denied.*usermod -aG docker"):
                engine.open_engine({"DOCKER_HOST": f"unix://{place}/engine.sock"})
        finally:
            os.seteuid(0)


def test_somebody_else_at_the_socket_is_no_engine(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "engine.sock"))
        end.listen()
        answering = subprocess.Popen(
            [sys.executable, "-c", "import socket; s = socket.socket(fileno=0)\nwhile True: s.accept()[0].close()"],
            stdin=end.fileno(),
        )
        try:
            with pytest.raises(SandboxUnavailable, match="does not work"):
                engine.open_engine({"DOCKER_HOST": f"unix://{tmp_path}/engine.sock"})
        finally:
            answering.kill()
            answering.wait()


# The container.


def test_a_container_is_closed() -> None:
    host = made(SandboxSpec(image="x"))["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["AutoRemove"]
    assert host["CapDrop"] == ["ALL"]
    assert not {"NET_RAW", "MKNOD", "SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN"} & set(host["CapAdd"])
    # The engine's own filter of system calls, and its masks, are what they are without these.
    assert not {"Privileged", "SecurityOpt", "MaskedPaths", "ReadonlyPaths", "PidMode", "Devices"} & set(host)
    assert host["LogConfig"]["Config"]["max-size"]
    writable = [mount["Target"] for mount in host["Mounts"] if not mount.get("ReadOnly")]
    assert writable == [sockets.INSIDE]


def test_a_container_begins_with_the_server_and_nothing_of_its_image() -> None:
    spec = SandboxSpec(image="x", environment={"A": "1"}, user="me", workdir="below/../place", lease_seconds=5.0)
    found = made(spec, EngineImage(**{**fields_of(IMAGE), "checks_health": True}))
    assert (found["Entrypoint"], found["Cmd"], found["User"]) == (RUNTIME.argv(), [], "0:0")
    variables = dict(line.split("=", 1) for line in found["Env"])
    assert variables.pop("LD_PRELOAD") == ""
    settings = Settings.of(variables[VARIABLE])
    assert settings == Settings(
        name="name",
        certificate="certificate",
        path="/.kuberoll-socket/s",
        user="me",
        workdir="/place",
        environment={"PATH": "/bin", "A": "1"},
        lease_seconds=5.0,
        start_seconds=30.0,
    )
    assert found["Healthcheck"] == {"Test": ["NONE"]}
    assert "Healthcheck" not in made(spec)
    of_image = body.settings_of("name", SandboxSpec(image="x"), IMAGE, "certificate")
    assert (of_image.user, of_image.workdir) == ("app", "/srv")


@given(
    cpus=st.none() | st.floats(0.01, 1000),
    memory=st.none() | st.integers(6 << 20, 1 << 40),
    processes=st.integers(1, 1 << 20),
    storage=st.none() | st.integers(1, 1 << 40),
    limits=st.sets(st.sampled_from(sorted(ENGINE.limits))),
    limits_storage=st.booleans(),
)
def test_a_container_has_the_limits_that_its_engine_has(
    cpus: float | None, memory: int | None, processes: int, storage: int | None, limits: set[str], limits_storage: bool
) -> None:
    found = Engine(**{**fields_of(ENGINE), "limits": frozenset(limits)})
    spec = SandboxSpec(image="x", cpus=cpus, memory=memory, processes=processes, storage=storage)
    host = made(spec, engine=found, limits_storage=limits_storage)["HostConfig"]
    assert host.get("Memory") == host.get("MemorySwap") == (memory if "memory" in limits else None)
    assert host.get("StorageOpt") == ({"size": str(storage)} if storage and limits_storage else None)
    assert ("PidsLimit" in host) == ("processes" in limits)
    assert processes < host.get("PidsLimit", processes + 8) <= processes + 8
    if cpus is None or "cpus" not in limits:
        assert "NanoCpus" not in host
    else:
        assert 0 < host["NanoCpus"] <= ENGINE.cpus * 10**9
    assert host["ShmSize"] >= min(64 << 20, (memory or 1 << 40) // 2)
    assert host["ShmSize"] <= max(64 << 20, (memory or 0) // 4)


def test_each_start_learns_that_storage_is_not_limited() -> None:
    docker = pytest.importorskip("docker")
    asked: list[bool] = []
    missed: list[None] = []

    class Client:
        def create_container_from_config(self, wanted: dict[str, Any], name: str) -> dict[str, str]:
            asked.append(wanted["limited"])
            if wanted["limited"]:
                raise docker.errors.APIError("--storage-opt is supported only for overlay over xfs")
            return {"Id": name}

    def create(*, limits_storage: bool) -> str:
        return create_container(
            Client(),
            "one",
            lambda limits_storage: {"limited": limits_storage},
            limits_storage=limits_storage,
            missed=lambda: missed.append(None),
        )

    # Two that begin before either has an answer.
    assert [create(limits_storage=True), create(limits_storage=True)] == ["one", "one"]
    assert (asked, len(missed)) == ([True, False, True, False], 2)
    assert create(limits_storage=False) == "one"
    assert len(missed) == 2


def test_a_root_that_is_read_only_has_room_in_a_few_places() -> None:
    found = made(SandboxSpec(image="x", read_only=True, storage=2000, memory=16_000))
    assert found["HostConfig"]["ReadonlyRootfs"]
    assert found["HostConfig"]["Tmpfs"] == {
        "/tmp": "rw,exec,nosuid,nodev,mode=1777,size=2000",
        "/run": "rw,exec,nosuid,nodev,mode=755,size=1000",
    }
    assert found["Volumes"] == {"/srv": {}}
    for workdir in ("/", "/tmp", "/tmp/below", "/run/this"):
        assert "Volumes" not in made(SandboxSpec(image="x", read_only=True, workdir=workdir))
    assert "Tmpfs" not in made(SandboxSpec(image="x"))["HostConfig"]


def test_where_files_have_labels_the_containers_are_shared() -> None:
    labelled = Engine(**{**fields_of(ENGINE), "labels_files": True})
    host = made(SandboxSpec(image="x"), engine=labelled)["HostConfig"]
    assert host["Binds"] == [f"/cache/runtime:{PLACE}:ro,z", f"/run/name.d:{sockets.INSIDE}:z"]
    assert "Mounts" not in host


# Owners.


@given(st.uuids(), st.integers(1, 1 << 32), st.integers(1, 1 << 22), st.integers(0, 1 << 60))
def test_an_owner_is_read_as_it_was_written(boot: object, namespace: int, process: int, started: int) -> None:
    owner = Owner(str(boot), namespace, process, started)
    assert Owner.of(str(owner)) == owner


@pytest.mark.parametrize("text", ["", "a/b/c/d", "boot/1/2", "boot/1/2/3/4"])
def test_an_owner_of_another_kind_is_none(text: str) -> None:
    assert Owner.of(text) is None


@pytest.mark.parametrize(
    ("owner", "there", "gone"),
    [
        (HERE, 100, False),
        (HERE._replace(process=11), 100, False),
        # Its id has been given to another one since.
        (HERE._replace(process=11), 101, True),
        (HERE._replace(process=11), None, True),
        # Nobody here knows.
        (HERE._replace(namespace=2), None, False),
        (HERE._replace(boot="before"), 100, True),
        (HERE._replace(boot="before", namespace=2), 100, True),
    ],
)
def test_an_owner_is_gone_when_its_process_is(owner: Owner, there: int | None, gone: bool) -> None:
    assert owners.is_gone(owner, HERE, lambda process: there) is gone


def test_a_process_is_told_from_all_others() -> None:
    here = owners.this_process()
    assert not owners.is_gone(here, here)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = owners.start_of(child.pid)
    assert started is not None
    its = here._replace(process=child.pid, started=started)
    assert not owners.is_gone(its, here)
    child.communicate()
    assert owners.is_gone(its, here)


@pytest.mark.parametrize(
    ("labels", "left"),
    [
        ({}, False),
        ({body.OWNER_LABEL: "boot/1/10/100"}, False),
        ({body.OWNER_LABEL: "before/1/10/100"}, True),
        ({body.OWNER_LABEL: "boot/2/10/100", body.EXPIRES_LABEL: "999"}, True),
        ({body.OWNER_LABEL: "boot/2/10/100", body.EXPIRES_LABEL: "1001"}, False),
        ({body.OWNER_LABEL: "nonsense", body.EXPIRES_LABEL: "soon"}, False),
    ],
)
def test_what_was_left_behind_is_told_by_its_labels(labels: dict[str, str], left: bool) -> None:
    # In another PID namespace, where ids say nothing.
    assert driver.is_left(labels, HERE._replace(namespace=3), 1000.0) is left


# Sockets.


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as directory:
        yield Path(directory)


def test_a_socket_is_taken_out_of_its_container(short: Path) -> None:
    places = sockets.Sockets(short)
    assert places.directory.stat().st_mode & 0o777 == 0o700
    shared = places.share("name")
    inside = os.open(shared, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(shared / sockets.NAME))
        server.listen()
        places.take("name")
        client.connect(str(places.path("name")))
        assert not shared.exists()
        with pytest.raises(FileNotFoundError):
            # Whoever has the directory still can make nothing in it.
            os.open("mine", os.O_CREAT | os.O_WRONLY, dir_fd=inside)
    os.close(inside)
    places.drop("name")
    places.drop("name")
    assert [path.name for path in places.directory.iterdir()] == ["lock"]
    places.close()
    assert not list(short.iterdir())


def test_sockets_have_addresses_that_the_system_takes(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    short = Path("/tmp")
    assert sockets.base_of({"TMPDIR": str(long)}) == short
    assert sockets.base_of({"XDG_RUNTIME_DIR": "/no/such/place", "TMPDIR": "/var/tmp"}) == Path("/var/tmp")
    assert sockets.base_of({RUN_SCRATCH_VARIABLE: "/var/tmp", "XDG_RUNTIME_DIR": "/tmp"}) == Path("/var/tmp")
    places = sockets.Sockets(short)
    with contextlib.closing(places), socket.socket(socket.AF_UNIX) as server:
        server.bind(str(places.share("x" * 40) / sockets.NAME))
        assert len(os.fsencode(places.path("x" * 40))) < 100


def test_only_what_nobody_uses_is_removed(tmp_path: Path) -> None:
    used, left = sockets.Sockets(tmp_path), sockets.Sockets(tmp_path)
    left.share("name")
    os.close(left._lock)
    young = tmp_path / "kuberoll-containers-young"
    young.mkdir()
    old = tmp_path / "kuberoll-containers-old"
    old.mkdir()
    os.utime(old, (0, 0))
    sockets.remove_leftovers(tmp_path)
    assert {*tmp_path.iterdir()} == {used.directory, young}
    with (used.directory / "lock").open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    used.close()


# Images and words.


def test_an_image_is_what_docker_would_have_saved(tmp_path: Path) -> None:
    layers = [layer_of({"a": b"1" * 1000}), layer_of({"b": b"2"}), layer_of({"a": b"1" * 1000})]
    config = {"User": "app", "Env": ["A=b=c", "EMPTY="], "WorkingDir": "/srv", "Cmd": ["sh"]}
    reference = parse(write_layout(tmp_path, layers, config))
    assert isinstance(reference, LayoutReference)
    source = LayoutSource(reference)
    data = b"".join(images.archive_of(source, source.find(), "localhost/name:tag"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    [image] = json.loads(contents["manifest.json"])
    assert image["RepoTags"] == ["localhost/name:tag"]
    assert [contents[name] for name in image["Layers"]] == layers
    assert len(contents) == 4
    found = json.loads(contents[image["Config"]])
    assert found["config"] == {**config, "Entrypoint": None}
    assert len(found["rootfs"]["diff_ids"]) == 3


def test_an_image_of_an_engine_says_who_works_where(caplog: pytest.LogCaptureFixture) -> None:
    found = images.describe(
        {
            "Id": "sha256:1",
            "Architecture": "s390x",
            "Config": {"Env": ["A=b=c", "WRONG"], "Healthcheck": {"Test": ["x"]}},
        },
        "name",
    )
    assert found == EngineImage(id="sha256:1", environment={"A": "b=c"}, user="", workdir="/", checks_health=True)
    assert "name is for s390x" in caplog.text
    assert images.describe({"Id": "1", "Config": None}, "name").workdir == "/"


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300))), st.integers(0, 400))
def test_what_a_container_wrote_is_text(frames: list[tuple[int, bytes]], cut: int) -> None:
    data = b"".join(struct.pack(">BxxxL", stream, len(content)) + content for stream, content in frames)
    whole = b"".join(content for _, content in frames)
    assert output.text_of(data) == whole.decode(errors="replace")
    # What is missing at its end spoils nothing before it.
    assert len(output.text_of(data[:cut])) <= max(len(whole), cut)


def test_what_an_engine_says_has_its_remedy() -> None:
    assert driver.explained(ValueError("controller `pids` is not available")).endswith("delegate.conf")
    assert "outside of containers" in driver.explained(ValueError("exec: /.kuberoll/ld: no such file or directory"))
    assert driver.explained(ValueError("no more")) == "no more"


async def test_a_driver_that_never_started_is_closed(tmp_path: Path) -> None:
    found = driver.DockerDriver(cache=tmp_path, variables={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    await found.remove("nobody")
    for _ in range(2):
        with pytest.raises(SandboxUnavailable, match="no such socket"):
            await found.check()
    await asyncio.gather(found.close(), found.close())


def fields_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def layer_of(files: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()
