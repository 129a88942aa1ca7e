"""What a machine sees of an image is what buildah makes of it: names, types, modes, owners, contents and links."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.sandboxes.images.layers import Limits
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.users import id_map
from tests.sandboxes.images.archives import DIRECTORY, FILE, HARD_LINK, SYMLINK, entry, tar, write_layout
from tests.sandboxes.images.machine import mounted
from tests.sandboxes.images.registries import Buildah
from tests.sandboxes.images.trees import tree_of
from tests.sandboxes.people import ordinary

pytestmark = pytest.mark.processes

BUSYBOX = Path("/bin/busybox")

CONTAINERFILE = r"""
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "/bin"]
RUN set -e; mkdir -p /tmp /etc /home/user /d/e/f /g/old /h /kept/deep /proc /dev; chmod 1777 /tmp; \
    echo root:x:0:0::/:/bin/sh > /etc/passwd; \
    for i in 1 2 3; do echo $i > /d/e/f/$i; echo $i > /g/old/$i; echo $i > /kept/deep/$i; done; \
    ln -s /etc/passwd /d/absolute; ln -s ../../etc /d/e/up; ln -s nowhere /d/dangling; ln /d/e/f/1 /d/hard; \
    mkfifo /d/fifo; chmod 600 /d/fifo; \
    echo su > /d/su; chown 1000:1001 /d/su; chmod 6755 /d/su; \
    echo closed > /h/closed; chmod 000 /h/closed; chown 65534:65534 /h/closed; \
    mkdir /h/setgid; chmod 2770 /h/setgid; chown 12:34 /h/setgid; chown -h 5:6 /d/dangling; \
    touch -d '2001-02-03 04:05:06' /d/old; \
    n=$(printf '%0200d' 0); mkdir -p /h/$n/$n; echo long > /h/$n/$n/$n; \
    echo odd > "$(printf '/h/b\377yte')"; echo odd > '/h/spa ce'; echo odd > /h/ünïcode; \
    dd if=/dev/zero of=/h/sparse bs=1 count=1 seek=5000000
RUN set -e; rm /d/e/f/2; rm -r /kept/deep; rm -r /g; mkdir /g; echo new > /g/new; \
    rm -r /d/e; echo file > /d/e; rm /d/old; mkdir -p /d/old/now/a/directory; ln -sf /h /d/dangling; \
    chmod 700 /h; chown 99 /h
RUN set -e; mkdir /kept/deep; echo again > /kept/deep/1; mv /d/su /d/moved; rm /d/hard; chmod 4711 /bin/busybox
USER user
WORKDIR /home/user
"""


def built(buildah: Buildah, folder: Path) -> str:
    """An image of many layers, with everything that file systems have."""
    if not BUSYBOX.exists() or subprocess.run(["ldd", BUSYBOX], capture_output=True, check=False).returncode == 0:
        pytest.skip("no static busybox")
    shutil.copy(BUSYBOX, folder / "busybox")
    (folder / "Containerfile").write_text(CONTAINERFILE)
    buildah(
        "bud", "--layers", "--isolation", "chroot", "--tag", "everything", "--file", "Containerfile", ".", cwd=folder
    )
    return "everything"


def handmade(buildah: Buildah, folder: Path) -> str:
    """An image with what buildah does not write itself: opaque directories, and layers without their directories."""
    root = entry("./", DIRECTORY)
    directory = entry("a/", DIRECTORY, mode=0o711)
    plains = [
        [root, directory, *(entry(f"a/{i}", FILE, b"x") for i in range(3)), entry("b/c/d", FILE, b"x")],
        [root, entry("tmp/", DIRECTORY, mode=0o1777, gid=3), directory, entry("a/.wh..wh..opq"), entry(".wh.b")],
        [entry("a/new", FILE, b"new"), entry("tmp/file", FILE, b"x")],
        [root, entry("b/", DIRECTORY, uid=4), entry("b/link", SYMLINK, link="../a/new"), entry("a/hard", FILE, b"h")],
        [
            root,
            directory,
            entry("a/twice", FILE, b"t"),
            entry("a/again", HARD_LINK, link="a/twice"),
            entry("a/.wh.new"),
        ],
        [root, directory, entry("a/new/", DIRECTORY), entry("a/new/deep", FILE, b"deep"), entry("a/.wh.hard")],
    ]
    write_layout(folder / "layout", {"tag": [tar(members) for members in plains]})
    return buildah("pull", f"oci:{folder / 'layout'}:tag").strip().splitlines()[-1]


def debian(buildah: Buildah, folder: Path) -> str:
    """A distribution, with Python, as debootstrap makes it."""
    from tests.containers.containerd import MissingTools
    from tests.containers.images import builder

    try:
        tool = builder()
        tool.buildah("push", tool.base(), f"oci:{folder / 'debian'}:tag")
    except MissingTools as missing:
        pytest.skip(str(missing))
    return buildah("pull", f"oci:{folder / 'debian'}:tag").strip().splitlines()[-1]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    return Buildah(tmp_path_factory.mktemp("buildah"))


@pytest.fixture(params=[built, handmade, pytest.param(debian, marks=pytest.mark.long)], ids=lambda one: one.__name__)
def image(request: pytest.FixtureRequest, buildah: Buildah, tmp_path: Path) -> str:
    made: str = request.param(buildah, tmp_path)
    return made


def without_mounts(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree without devices, which machines are given by other means."""
    return {name: one for name, one in tree.items() if one["kind"] not in ("character", "block")}


@pytest.mark.parametrize("kind", ["docker-archive", "oci"])
def test_root_sees_what_buildah_makes(buildah: Buildah, image: str, place: Path, kind: str) -> None:
    reference = f"{kind}:{place / 'image'}"
    buildah("push", image, f"{reference}:any:tag")
    found = ImageStore(place / "store", id_map(), limits=Limits(reserve=0)).image(reference)
    ours = without_mounts(mounted(id_map(), list(found.layers), place / "scratch", tree_of))
    with buildah.mounted(image) as root:
        theirs = without_mounts(tree_of(str(root)))
    assert ours.keys() == theirs.keys()
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == {}
    inspected = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert found.user == inspected.get("User", "")
    assert found.workdir == inspected.get("WorkingDir", "/")
    assert [f"{name}={value}" for name, value in found.environment.items()] == (inspected.get("Env") or [])


@pytest.mark.parametrize("subordinate", [True, False])
def test_ordinary_users_see_what_buildah_makes(buildah: Buildah, image: str, subordinate: bool) -> None:
    with ordinary(subordinate=subordinate) as person:
        path = person.home / "image.tar"
        buildah("push", image, f"docker-archive:{path}:any:tag")
        request = {
            "store": str(person.home / "store"),
            "scratch": str(person.home / "scratch"),
            "reference": f"docker-archive:{path}",
            "remove": True,
        }
        done = person.run([sys.executable, "-m", "tests.sandboxes.images.machine", json.dumps(request)])
        answer = json.loads(done.stdout)
        ours = without_mounts(answer["tree"])
        left = [path.name for path in (person.home / "store").glob("*/layers/*")]
    with buildah.mounted(image) as root:
        theirs = without_mounts(tree_of(str(root)))
    if not subordinate:
        for one in theirs.values():
            one["uid"] = one["gid"] = 0
    assert ours.keys() == theirs.keys()
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == {}
    assert left == []
