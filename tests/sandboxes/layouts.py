"""OCI layouts that tests write themselves: images of busybox, which need no builder and no registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BUSYBOX: Final = shutil.which("busybox")
"""A busybox that needs no libraries, of Debian's busybox-static."""

APPLETS: Final = (
    "awk", "cat", "chmod", "chown", "chroot", "cp", "date", "dd", "dmesg", "echo", "env", "expr", "false", "find",
    "grep", "head", "hostname", "httpd", "id", "insmod", "kill", "killall", "ln", "ls", "mkdir", "mkfifo", "mknod",
    "mount", "nc", "nslookup", "ping", "pkill", "printf", "ps", "pwd", "readlink", "reboot", "rm", "sed", "seq",
    "setsid", "sh", "sha256sum", "sleep", "sort", "stat", "su", "swapoff", "tail", "tar", "test", "touch", "tr", "true",
    "uname", "unshare", "wc", "wget", "yes",
)  # fmt: skip
PASSWD: Final = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"
GROUP: Final = "root:x:0:\napp:x:1000:\nwheel:x:10:app\n"


def busybox_layout(
    directory: Path, *, files: Mapping[str, str | bytes] | None = None, owner: int = 0, **config: Any
) -> str:
    """Write an image of busybox alone.

    Args:
        files: Further files by path, with their content; programs begin with `#!` or ELF's magic number.
        owner: User whose the working directory and these files are.
        config: Fields of its configuration, such as User, WorkingDir, Env.

    Returns:
        Its reference.
    """
    assert BUSYBOX is not None
    layer = _Layer()
    for name in ("bin", "etc", "root", "home", "home/app", "work"):
        layer.directory(name, owner={"home/app": 1000, "work": owner}.get(name, 0))
    layer.file("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755)
    for name in APPLETS:
        layer.link(f"bin/{name}", "busybox")
    for name, text in {"etc/passwd": PASSWD, "etc/group": GROUP}.items():
        layer.file(name, text.encode())
    for name, given in (files or {}).items():
        content = given.encode() if isinstance(given, str) else given
        layer.file(name, content, mode=0o755 if content.startswith((b"#!", b"\x7fELF")) else 0o644, owner=owner)
    return write_layout(directory, [layer.content()], {"WorkingDir": "/work", **config})


def write_layout(
    directory: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any],
    *,
    packed: Callable[[bytes], bytes] | None = None,
) -> str:
    """Write an image of layers, which are tar archives.

    Args:
        packed: Compresses a layer with gzip; None: they stay as they are.

    Returns:
        Its reference.
    """
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    configuration = {
        "architecture": machine,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(configuration).encode(), "config.v1+json"),
        "layers": [
            blob(layer, "layer.v1.tar") if packed is None else blob(packed(layer), "layer.v1.tar+gzip")
            for layer in layers
        ],
    }
    described = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    described["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return f"oci:{directory}"


class _Layer:
    """A tar archive."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._bytes, mode="w")  # noqa: SIM115 - closed by `content`

    def directory(self, name: str, *, owner: int = 0) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, 0o755, owner, owner
        self._archive.addfile(member)

    def file(self, name: str, content: bytes, *, mode: int = 0o644, owner: int = 0) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.uid, member.gid = len(content), mode, owner, owner
        self._archive.addfile(member, io.BytesIO(content))

    def link(self, name: str, target: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._archive.addfile(member)

    def content(self) -> bytes:
        self._archive.close()
        return self._bytes.getvalue()
