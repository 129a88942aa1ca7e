"""A store: layers unpacked once and shared, whole or not at all, and removed when nobody uses them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.errors import (
    DigestMismatch,
    ImageError,
    ImageInvalid,
    ImageNotFound,
    ImageUnavailable,
    NoSpace,
)
from kuberoll_workers.sandboxes.images.layers import Limits
from kuberoll_workers.sandboxes.images.store import Image, ImageStore
from kuberoll_workers.sandboxes.users import IdMap, id_map
from tests.examples import examples
from tests.sandboxes.images.archives import DIRECTORY, FILE, SYMLINK, entry, tar, write_archive, write_layout
from tests.sandboxes.images.machine import mounted
from tests.sandboxes.images.places import open_place
from tests.sandboxes.images.trees import tree_of
from tests.sandboxes.namespaces import run_in
from tests.sandboxes.people import ordinary

pytestmark = pytest.mark.slow

LIMITS = Limits(reserve=0)
BASE = tar([entry("./", DIRECTORY), entry("base", FILE, b"base"), entry("gone", FILE), entry("d/", DIRECTORY)])
TOP = tar([entry("./", DIRECTORY), entry("top", FILE, b"top"), entry(".wh.gone")])


@pytest.fixture
def ids() -> IdMap:
    return id_map()


def store_of(place: Path, ids: IdMap, **more: Any) -> ImageStore:
    return ImageStore(place / "store", ids, **{"limits": LIMITS, **more})


def layout(place: Path, *plains: bytes, name: str = "layout", **config: Any) -> str:
    """The reference of an image of such layers in an OCI layout."""
    return f"oci:{write_layout(place / name, {'tag': plains}, **config)}"


def parts_of(place: Path) -> dict[str, list[str]]:
    """What lies in a store, by its directories."""
    (root,) = (place / "store").iterdir()
    return {path.name: sorted(one.name for one in path.iterdir()) for path in root.iterdir()}


def test_an_image_is_what_its_configuration_says(place: Path, ids: IdMap) -> None:
    config: dict[str, Any] = {
        "User": "1000:1001",
        "Env": ["A=b"],
        "WorkingDir": "/w",
        "Entrypoint": ["/e"],
        "Cmd": ["c", "d"],
    }
    image = store_of(place, ids).image(layout(place, BASE, TOP, **config))
    assert (image.user, image.workdir, image.entrypoint, image.command) == ("1000:1001", "/w", ("/e",), ("c", "d"))
    assert image.environment == {"A": "b"}
    assert image.size == 7
    assert image.digest.startswith("sha256:")
    tree = mounted(ids, list(image.layers), place / "scratch", tree_of)
    assert tree.keys() == {"base", "d", "top"}
    assert {(one["uid"], one["gid"]) for one in tree.values()} == {(0, 0)}


@pytest.mark.parametrize("how", ["plain", "gzip", "zstd"])
def test_layers_are_shared_by_what_they_are(place: Path, ids: IdMap, how: str) -> None:
    store = store_of(place, ids)
    first = store.image(f"oci:{write_layout(place / 'one', {None: [BASE]}, how)}")
    (layer,) = first.layers
    before = layer.stat()
    second = store.image(f"docker-archive:{write_archive(place / 'two.tar', [BASE, TOP], ['two:1'])}:two:1")
    assert second.layers[0] == layer
    assert (layer.stat().st_ino, layer.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    use = store.disk_use()
    assert (use.images, use.layers, use.unpacked, use.downloaded) == (2, 2, 7, 0)
    assert parts_of(place)["layers"] == sorted(
        name for path in second.layers for name in (path.name, f"{path.name}.json")
    )


def test_what_is_there_is_taken_again_by_any_store(place: Path, ids: IdMap) -> None:
    reference = layout(place, BASE)
    image = store_of(place, ids).image(reference)
    # Unpacking it again would fail.
    assert store_of(place, ids, limits=Limits(entries=0)).image(reference) == image


def test_a_layout_or_archive_that_is_another_one_now(place: Path, ids: IdMap) -> None:
    store = store_of(place, ids)
    first = store.image(layout(place, BASE))
    second = store.image(layout(place, BASE, TOP))
    assert len(second.layers) == 2
    assert first.reference == second.reference
    path = write_archive(place / "image.tar", [BASE])
    one = store.image(f"docker-archive:{path}")
    path.unlink()
    write_archive(path, [TOP])
    assert store.image(f"docker-archive:{path}").digest != one.digest
    path.unlink()
    with pytest.raises(ImageNotFound, match="docker save"):
        store.image(f"docker-archive:{path}")


def test_an_image_without_layers_and_one_with_a_layer_twice(place: Path, ids: IdMap) -> None:
    store = store_of(place, ids)
    nothing = store.image(layout(place, name="nothing"))
    assert len(nothing.layers) == 1
    assert mounted(ids, list(nothing.layers), place / "scratch", tree_of) == {}
    twice = store.image(layout(place, BASE, TOP, BASE, name="twice"))
    assert len(twice.layers) == 2
    assert mounted(ids, list(twice.layers), place / "other", tree_of).keys() == {"base", "d", "gone", "top"}


def test_layers_without_their_directories_are_of_their_image(place: Path, ids: IdMap) -> None:
    bare = tar([entry("tmp/file", FILE, b"x")])
    below = [tar([entry("tmp/", DIRECTORY, mode=mode, uid=uid)]) for mode, uid in ((0o1777, 0), (0o700, 0))]
    store = store_of(place, ids)
    images = [
        store.image(layout(place, *plains, name=str(i)))
        for i, plains in enumerate([[bare], *([one, bare] for one in below)])
    ]
    assert len({image.layers[-1] for image in images}) == 3
    modes = [
        mounted(ids, list(image.layers), place / f"s{i}", tree_of)["tmp"]["mode"] for i, image in enumerate(images)
    ]
    assert modes == ["0o755", "0o1777", "0o700"]
    assert store.image(layout(place, below[0], bare, TOP, name="3")).layers[:2] == images[1].layers


def program(path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    """A program of this machine, and the libraries that it loads."""
    text = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    return [
        entry(name, FILE, Path(name).read_bytes(), mode=0o755)
        for name in re.findall(r"/\S+", text)
        if Path(name).is_file()
    ]


def test_what_a_machine_lists_is_there(place: Path, ids: IdMap) -> None:
    base = tar([entry("./", DIRECTORY), entry("o/", DIRECTORY), entry("o/f", FILE), entry("m/", DIRECTORY)])
    members = ["d/.wh.x", "d/y", "m/.wh.x", ".wh.x", "o/.wh.f", "o/.wh..wh..opq", "o/new"]
    top = tar([entry("./", DIRECTORY), *(entry(name, FILE) for name in members)])
    store = store_of(place, ids)
    for number, plains in enumerate([[base, top], [top], [top, base]]):
        image = store.image(layout(place, *plains, name=str(number)))
        # It looks at everything that is listed.
        tree = mounted(ids, list(image.layers), place / f"scratch{number}", tree_of)
        assert {"d", "d/y", "o", "o/new", "m"} <= tree.keys() <= {"d", "d/y", "o", "o/new", "m", "o/f"}


def test_a_capability_of_a_file_is_one_in_the_machine(place: Path, ids: IdMap) -> None:
    cat = Path("/usr/bin/cat")
    if ids.count == 1 or not cat.exists() or shutil.which("ldd") is None:
        pytest.skip("this user has a single id, or there is no /usr/bin/cat or ldd")
    # CAP_NET_RAW, permitted and effective.
    capability = bytes.fromhex("0100000200200000000000000000000000000000").decode()
    content = cat.read_bytes()
    pax = {"SCHILY.xattr.security.capability": capability}
    plain = tar(
        [
            *program(cat),
            entry("proc/", DIRECTORY),
            entry("plain", FILE, content, mode=0o755),
            entry("capable", FILE, content, mode=0o755, pax=pax),
            entry("setuid", FILE, content, mode=0o4755, uid=7),
        ]
    )
    image = store_of(place, ids).image(layout(place, plain))

    def body(root: str) -> list[dict[str, str]]:
        return [
            dict(line.split(":", 1) for line in run_in(root, [path, "/proc/self/status"], 1000).splitlines())
            for path in ("/plain", "/capable", "/setuid")
        ]

    plainly, capable, setuid = mounted(ids, list(image.layers), place / "scratch", body)
    assert [int(found["CapEff"], 16) for found in (plainly, capable, setuid)] == [0, 1 << 13, 0]
    assert [found["Uid"].split()[1] for found in (plainly, capable, setuid)] == ["1000", "1000", "7"]


@pytest.mark.parametrize("subordinate", [False, True])
def test_an_ordinary_user_has_images_too(subordinate: bool) -> None:
    with ordinary(subordinate=subordinate) as person:
        plain = tar(
            [
                entry("./", DIRECTORY, mode=0o555, uid=1000),
                entry("closed/", DIRECTORY, mode=0o000),
                entry("closed/file", FILE, b"x", uid=1000, gid=100, mode=0o4000),
                entry("link", SYMLINK, link="/x", uid=7),
                entry("gone", FILE, b"x"),
            ]
        )
        path = write_archive(person.home / "image.tar", [plain, tar([entry(".wh.gone")])])
        request = {
            "store": str(person.home / "store"),
            "scratch": str(person.home / "scratch"),
            "reference": f"docker-archive:{path}",
            "remove": True,
        }
        done = person.run([sys.executable, "-m", "tests.sandboxes.images.machine", json.dumps(request)])
        found = json.loads(done.stdout)
        tree = found["tree"]
        assert found["count"] == (65536 if subordinate else 1)
        assert tree.keys() == {"closed", "closed/file", "link"}
        assert (tree["closed"]["mode"], tree["closed/file"]["mode"]) == ("0o0", "0o4000")
        owners = [(tree[name]["uid"], tree[name]["gid"]) for name in ("closed", "closed/file", "link")]
        assert owners == ([(0, 0), (1000, 100), (7, 0)] if subordinate else [(0, 0)] * 3)
        # Whoever's the files are, they are removed.
        assert found["removed"] == 2
        assert parts_of(person.home)["layers"] == []


NESTED = """
import json, os, subprocess, sys
from pathlib import Path
from kuberoll_workers.sandboxes.users import IdMap, IdRange
from tests.sandboxes.namespaces import inside
count = int(sys.argv[1])
ranges = (IdRange(0, 5_000_000, count),)
os.chown(json.loads(sys.argv[2])["home"], 5_000_000, 5_000_000)
def work():
    argv = [sys.executable, "-m", "tests.sandboxes.images.machine", sys.argv[2]]
    return subprocess.run(argv, capture_output=True, text=True).stdout
print(inside(IdMap(ranges, ranges), work))
"""


@pytest.mark.parametrize(("count", "own"), [(1, 1), (65536, 65536), (300_000, 65536)])
def test_root_of_a_user_namespace_has_images_too(count: int, own: int) -> None:
    # As where a machine of continuous integration is a container with few ids.
    with ordinary(subordinate=False) as person:
        person.home.chmod(0o711)
        path = write_archive(
            person.home / "image.tar", [BASE, tar([entry("mine", FILE, b"x", uid=1000), entry(".wh.gone")])]
        )
        request = {
            "home": str(person.home),
            "store": str(person.home / "store"),
            "scratch": str(person.home / "scratch"),
            "reference": f"docker-archive:{path}",
            "remove": True,
        }
        done = person.run([sys.executable, "-c", NESTED, str(count), json.dumps(request)], as_root=True)
        found = json.loads(done.stdout)
    assert found["count"] == own
    assert found["tree"].keys() == {"base", "d", "mine"}
    assert found["tree"]["mine"]["uid"] == (1000 if own > 1 else 0)
    assert found["removed"] == 5


def test_nobody_else_comes_near_what_is_unpacked(place: Path, ids: IdMap) -> None:
    image = store_of(place, ids).image(layout(place, tar([entry("su", FILE, b"x", mode=0o4755)])))
    root = image.layers[0].parent.parent
    for path in (root, root / "layers"):
        assert path.stat().st_mode & 0o007 == 0
        assert path.stat().st_gid == (ids.outside_group(0) if ids.outside(0) != os.geteuid() else path.stat().st_gid)


# Failures.


def test_a_layer_that_is_another_than_its_image_says(place: Path, ids: IdMap) -> None:
    reference = layout(place, BASE)
    path = place / "layout/blobs/sha256"
    index = json.loads((place / "layout/index.json").read_text())
    manifest = json.loads((path / index["manifests"][0]["digest"][7:]).read_text())
    blob = path / manifest["layers"][0]["digest"][7:]
    good = blob.read_bytes()
    blob.write_bytes(good + bytes(100))
    store = store_of(place, ids)
    with pytest.raises(DigestMismatch, match=r"layer 1 of 1: the stored layer has the digest"):
        store.image(reference)
    blob.write_bytes(good[:-10])
    with pytest.raises(ImageInvalid, match="cut off"):
        store.image(reference)
    assert parts_of(place)["layers"] == []
    blob.write_bytes(good)
    assert len(store.image(reference).layers) == 1


def test_a_layer_that_is_hostile_leaves_nothing(place: Path, ids: IdMap) -> None:
    reference = layout(place, BASE, tar([entry("a/b", FILE, b"x"), entry("../../out", FILE, b"x")]))
    store = store_of(place, ids)
    with pytest.raises(ImageInvalid, match=r"layer 2 of 2: entry '../../out': .* leads out"):
        store.image(reference)
    assert len(parts_of(place)["layers"]) == 2
    assert parts_of(place)["images"] == []


def test_headers_that_take_forever_end_the_process_that_reads(
    place: Path, ids: IdMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `tarfile` reads numbers with an expression that is quadratic in their digits.
    header = b"1" * ((1 << 20) - 1)
    info, _ = entry("x")
    block = bytearray(info.tobuf())
    raw = bytearray(512)
    raw[0:1], raw[156:157], raw[257:263], raw[263:265] = b"x", b"x", b"ustar\0", b"00"
    raw[100:108], raw[108:116], raw[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    raw[124:136], raw[136:148] = f"{len(header):011o}\0".encode(), b"00000000000\0"
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    plain = bytes(raw) + header + bytes(1) + bytes(block) + bytes(1024)
    with pytest.raises(ImageInvalid, match=r"takes forever|damaged"):
        store_of(place, ids).image(layout(place, plain))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk that is small")
def test_a_full_disk_is_told(place: Path, ids: IdMap) -> None:
    big = tar([entry(f"f{i}", FILE, os.urandom(1 << 20)) for i in range(8)])
    reference = layout(place, BASE, big)
    (place / "store").mkdir(mode=0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=711", "none", place / "store"], check=True)
    try:
        for limits in (LIMITS, Limits(reserve=1 << 20)):
            with pytest.raises(NoSpace, match="another directory"):
                store_of(place, ids, limits=limits).image(reference)
            # What was unpacked before stays, and the rest is gone.
            assert len(parts_of(place)["layers"]) == 2
    finally:
        subprocess.run(["umount", "-l", place / "store"], check=True)


def test_a_directory_that_may_not_be_written() -> None:
    with ordinary(subordinate=False) as person:
        program = """
import sys
from pathlib import Path
from kuberoll_workers.sandboxes.images.errors import ImageUnavailable
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.users import id_map
try:
    ImageStore(Path("/nowhere"), id_map()).image("oci:/x")
except ImageUnavailable as error:
    print(error)
"""
        assert "user 54321 must be able to write there" in person.run([sys.executable, "-c", program]).stdout


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("oci:{place}/layout:other", "none of this name, but tag, tag2"),
        ("oci:{place}/layout", "there are several: name one"),
        ("oci:{place}/nothing", "no OCI layout is there"),
        ("oci:{place}/image.tar", "docker-archive:FILE"),
        ("docker-archive:{place}/layout", "it is a directory"),
        ("docker-archive:{place}/image.tar:other", "none of this name, but docker.io/library/mine:latest"),
        ("docker-archive:{place}/image.tar.gz", "gunzip"),
        ("docker-archive:{place}/oci.tar", "oci:DIRECTORY"),
        ("docker-archive:{place}/layout/index.json", "no tar archive"),
    ],
)
def test_what_is_not_there_is_told_with_what_to_do(place: Path, ids: IdMap, text: str, hint: str) -> None:
    write_layout(place / "layout", {"tag": [BASE], "tag2": [TOP]})
    write_archive(place / "image.tar", [BASE], ["mine"])
    (place / "image.tar.gz").write_bytes(b"\x1f\x8b123")
    (place / "oci.tar").write_bytes(tar([entry("index.json", FILE, b"{}")]))
    with pytest.raises(ImageError, match=hint):
        store_of(place, ids).image(text.format(place=place))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes settings of the kernel")
def test_a_kernel_that_has_no_namespaces_left_is_explained() -> None:
    # The limit is that of a user namespace, and is changed in one that ends with the test.
    program = """
import sys
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from kuberoll_workers.sandboxes.users import UserNamespacesUnavailable, id_map
from kuberoll_workers.sandboxes.images.layers import Limits
from kuberoll_workers.sandboxes.images.unpacker import Unpacker
from pathlib import Path
try:
    with Unpacker(id_map(), Path("/tmp"), Limits()) as unpacker:
        unpacker.empty("nothing")
except UserNamespacesUnavailable as error:
    print(error)
"""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sysctl -w user.max_user_namespaces=15000" in done.stdout


# Threads, processes, and their ends.


def test_many_threads_unpack_it_once(place: Path, ids: IdMap) -> None:
    reference = layout(place, BASE, TOP)
    store = store_of(place, ids)
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda _: store.image(reference), range(8)))
    assert len(set(map(str, images))) == 1
    assert store.disk_use().layers == 2


PROGRAM = """
import sys
from pathlib import Path
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.users import id_map
print("ready", flush=True)
sys.stdin.readline()
print(ImageStore(Path(sys.argv[1]), id_map()).image(sys.argv[2]).layers, flush=True)
"""


def started(place: Path, reference: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(place / "store"), reference],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_many_processes_unpack_it_once(place: Path, ids: IdMap) -> None:
    reference = layout(place, *(tar([entry(f"f{i}", FILE, os.urandom(100_000))]) for i in range(6)))
    processes = [started(place, reference) for _ in range(3)]
    answers = {process.communicate("\n", timeout=120)[0] for process in processes}
    assert len(answers) == 1
    assert store_of(place, ids).disk_use().layers == 6


@pytest.mark.parametrize("victim", ["parent", "child"])
def test_what_was_killed_leaves_nothing(place: Path, ids: IdMap, victim: str) -> None:
    big = tar([entry(f"d{i}/file", FILE, os.urandom(1 << 20)) for i in range(24)])
    reference = layout(place, BASE, big)
    process = started(place, reference)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wait_for(lambda: list((place / "store").glob("*/layers/*.new/d1*")) or process.poll() is not None)
    child = child_of(process.pid)
    if victim == "parent" or child is None:
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
    process.communicate(timeout=60)
    image = store_of(place, ids).image(reference)
    assert mounted(ids, list(image.layers), place / "scratch", tree_of).keys() >= {"base", "d0/file", "d23/file"}
    assert not [name for name in parts_of(place)["layers"] if name.endswith((".new", ".old", ".tmp"))]


def wait_for(find: Any) -> Any:
    """What a function finds at last."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        # What is looked at may be gone in the next moment.
        with contextlib.suppress(FileNotFoundError):
            if found := find():
                return found
        os.sched_yield()
    raise TimeoutError("nothing was found")


def child_of(pid: int) -> int | None:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(found[0]) if found else None


def test_leftovers_are_removed_by_the_next(place: Path, ids: IdMap) -> None:
    reference = layout(place, BASE)
    store = store_of(place, ids)
    (key,) = (path.name for path in store.image(reference).layers)
    layers = next((place / "store").glob("*/layers"))
    # As if it had been killed at different points.
    (layers / key).rename(layers / f"{key}.new")
    assert [path.name for path in store.image(reference).layers] == [key]
    assert parts_of(place)["layers"] == [key, f"{key}.json"]
    (layers / f"{key}.json").unlink()
    (layers / key).rename(layers / f"{key}.new")
    assert (store.image(reference).layers[0] / "base").read_bytes() == b"base"
    (layers / f"{key}.old").mkdir()
    store.remove_unused()
    assert parts_of(place)["layers"] == [key, f"{key}.json"]


# Removal.


def test_what_nobody_uses_is_removed(place: Path, ids: IdMap) -> None:
    store = store_of(place, ids, grace=0.0)
    kept, other = layout(place, BASE, name="kept"), layout(place, BASE, TOP, name="other")
    image = store.image(other)
    store.image(kept)
    assert store.remove_unused([kept, other]) == 0
    assert store.remove_unused([kept]) == 3
    assert store.disk_use().layers == 1
    with pytest.raises(ImageUnavailable, match="ask for it again"):
        store.hold(image)
    assert store.image(other) == image
    with store.hold(image):
        assert store.remove_unused() == 0
        assert all(path.is_dir() for path in image.layers)
    assert store.remove_unused() == 7
    assert parts_of(place)["layers"] == []
    assert store.disk_use().images == 0


def test_what_was_asked_for_lately_stays(place: Path, ids: IdMap) -> None:
    store = store_of(place, ids)
    store.image(layout(place, BASE))
    assert store.remove_unused() == 0
    assert store.disk_use().layers == 1


def test_a_process_that_dies_holds_nothing(place: Path, ids: IdMap) -> None:
    store = store_of(place, ids, grace=0.0)
    image = store.image(layout(place, BASE))
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # Flushed: only where PYTHONUNBUFFERED is set a line goes out by itself.
            "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 1); print(flush=True); sys.stdin.read()",
            str(image.layers[0].with_name(f"{image.layers[0].name}.json")),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert store.remove_unused() == 0
    assert image.layers[0].is_dir()
    holder.kill()
    holder.communicate()
    # The image itself was forgotten before; its layer goes now.
    assert store.remove_unused() == 4


def test_removal_and_unpacking_do_not_meet(place: Path, ids: IdMap) -> None:
    references = [layout(place, BASE, tar([entry(f"f{i}", FILE, b"x" * i)]), name=str(i)) for i in range(4)]
    store = store_of(place, ids, grace=0.0)

    def use(number: int) -> Image:
        while True:
            try:
                image = store.image(references[number % 4])
                with store.hold(image):
                    assert all(
                        (path / ("base" if not i else f"f{number % 4}")).exists() for i, path in enumerate(image.layers)
                    )
                    return image
            except ImageUnavailable as error:
                if "removed" not in str(error):
                    raise

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(use, number) for number in range(24)]
        while not all(future.done() for future in futures):
            store.remove_unused()
        assert len({future.result().reference for future in futures}) == 4
    store.remove_unused()
    assert parts_of(place)["layers"] == []


# Any images.

names = st.sampled_from(["a", "b", "a/b", "a/c", "b/a", "a/b/c", "d"])
files = st.dictionaries(
    names,
    st.one_of(
        st.binary(max_size=3).map(lambda content: ("file", content)),
        st.just(("directory", b"")),
        st.sampled_from(["a", "/b"]).map(lambda target: ("link", target.encode())),
    ),
    max_size=6,
)


def whole(tree: dict[str, tuple[str, bytes]]) -> dict[str, tuple[str, bytes]]:
    """The same, with the directories that it takes, and without what is below a file."""
    found: dict[str, tuple[str, bytes]] = {}
    for name in sorted(tree):
        parents = ["/".join(name.split("/")[:i]) for i in range(1, name.count("/") + 1)]
        if all(found.get(parent, ("directory", b""))[0] == "directory" for parent in parents):
            found.update(dict.fromkeys(parents, ("directory", b"")))
            found[name] = tree[name]
    return found


def difference(before: dict[str, tuple[str, bytes]], after: dict[str, tuple[str, bytes]], opaque: bool) -> bytes:
    """A layer that makes one tree of another, as builders of images write it."""
    members = [entry("./", DIRECTORY)]
    hidden: set[str] = set()
    for name, (kind, content) in sorted(after.items()):
        if before.get(name) == (kind, content) and not any(name.startswith(f"{one}/") for one in hidden):
            if kind == "directory":
                members.append(entry(f"{name}/", DIRECTORY))
            continue
        if kind == "directory":
            members.append(entry(f"{name}/", DIRECTORY))
        elif kind == "link":
            members.append(entry(name, SYMLINK, link=content.decode()))
        else:
            members.append(entry(name, FILE, content))
    for name, (kind, _) in sorted(before.items()):
        parent = name.rpartition("/")[0]
        if name in after or (parent and after.get(parent, ("", b""))[0] != "directory"):
            continue
        if (
            opaque
            and kind == "file"
            and parent
            and not any(one.startswith(f"{parent}/") and before.get(one) == after[one] for one in after)
        ):
            members.append(entry(f"{parent}/.wh..wh..opq"))
        else:
            members.append(entry(f"{parent}/.wh.{name.rpartition('/')[2]}".lstrip("/")))
    return tar(members)


@settings(max_examples=examples(60))
@given(st.lists(files, min_size=1, max_size=4).map(lambda trees: [whole(tree) for tree in trees]), st.booleans())
def test_any_history_of_trees_is_seen_as_its_last(trees: list[dict[str, tuple[str, bytes]]], opaque: bool) -> None:
    ids = id_map()
    plains = [difference(before, after, opaque) for before, after in zip([{}, *trees], trees, strict=False)]
    with open_place() as place:
        image = store_of(place, ids).image(layout(place, *plains))
        seen = mounted(ids, list(image.layers), place / "scratch", tree_of)
    assert {name: one["kind"] for name, one in seen.items()} == {name: kind for name, (kind, _) in trees[-1].items()}
    sizes = {name: len(content) for name, (kind, content) in trees[-1].items() if kind == "file"}
    assert {name: one["size"] for name, one in seen.items() if one["kind"] == "file"} == sizes
