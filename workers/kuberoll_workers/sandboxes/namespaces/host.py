"""The host's own root as that of sandboxes, for tasks without an image: its programs, and nothing that is anybody's.

`/usr`, and what of `/bin`, `/sbin` and `/lib*` is no link into it, are mounted read-only. Of `/etc` a few files are
copied that programs need and everybody may read. There are users of its own (root, `user` and nobody), and an empty
`/root`, `/home`, `/opt`, `/srv`, `/tmp` and `/var`. Nothing else of the host is there: no home directory, no `/run`
with its sockets and tokens, no `/opt`, no configuration of programs, which often has secrets.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kuberoll_workers.sandboxes.images.references import HOST
from kuberoll_workers.sandboxes.images.store import Image
from kuberoll_workers.sandboxes.users import IdMap, situation

WORKDIR: Final = "/work"
"""Where commands run unless something else is said."""

_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Links that programs are called through, the linker's cache, certificates, names of numbers; nothing that a person
# fills in.
_COPIED: Final = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "gai.conf",
    "host.conf",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "xattr.conf",
)
_WRITTEN: Final = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}
# Configuration of programs that were installed by hand, with tokens of package registries among it.
_COVERED: Final = ("usr/local/etc", "usr/etc")
# What is mounted there from memory: Kubernetes and others give secrets so.
_VOLATILE: Final = ("tmpfs", "ramfs")
_MOST_BYTES: Final = 8 << 20
_OWN_USER: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoot:
    """A root made of the host's.

    Attributes:
        image: It as an image, whose only layer is what was made for it.
        shown: Directories of the host, without the first `/`, that are mounted in it, read-only.
        covered: What is hidden again below those.
    """

    image: Image
    shown: tuple[str, ...]
    covered: tuple[str, ...]


def problem() -> str | None:
    """Why this host's root can be no sandbox's, with the way out; None: it can."""
    shell = os.path.realpath("/bin/sh")
    if shell.startswith(tuple(f"/{name}/" for name in _SYSTEM)) and os.path.isfile(shell):
        return None
    return (
        f"this host keeps its programs elsewhere than in /usr, /bin and /lib (/bin/sh is {shell}), so that its root "
        "can be no sandbox's: give the task an image (docker_image), or the job one (sandbox.image)"
    )


def make_root(directory: Path, ids: IdMap, *, host: Path = Path("/")) -> HostRoot:
    """Make the root's own files.

    Args:
        directory: Where; it is made.
        ids: Users of the sandboxes, whose root gets the files.
        host: The host's root.

    Raises:
        OSError: Something cannot be written.
    """
    directory.mkdir(mode=0o755)
    shown = []
    for name in _SYSTEM:
        if (host / name).is_symlink():
            (directory / name).symlink_to(os.readlink(host / name))
        elif (host / name).is_dir():
            (directory / name).mkdir(mode=0o755)
            shown.append(name)
    for name, mode in (("etc", 0o755), ("home", 0o755), ("opt", 0o755), ("root", 0o700), ("run", 0o755)):
        (directory / name).mkdir(mode=mode)
    for name in ("srv", "var", "var/lib", "var/cache", "var/log", "home/user", WORKDIR.strip("/")):
        (directory / name).mkdir(mode=0o755)
    for name in ("tmp", "var/tmp"):
        (directory / name).mkdir()
        (directory / name).chmod(0o1777)
    (directory / "var/run").symlink_to("../run")
    for pattern in _COPIED:
        for source in sorted((host / "etc").glob(pattern)):
            _copy(source, directory / "etc" / source.relative_to(host / "etc"))
    for name, text in _WRITTEN.items():
        (directory / "etc" / name).write_text(text)
    _give(directory, ids)
    return HostRoot(
        image=Image(
            reference=HOST,
            digest="",
            layers=(directory,),
            user="",
            environment={"LANG": "C.UTF-8"},
            workdir=WORKDIR,
            entrypoint=(),
            command=(),
            size=0,
        ),
        shown=tuple(shown),
        covered=tuple(_covered(shown, host)),
    )


def volatile_mounts(mountinfo: str, places: Sequence[str]) -> list[str]:
    """What is mounted from memory below directories.

    Args:
        mountinfo: `/proc/self/mountinfo`, see proc(5).
        places: Directories, without the first `/`.
    """
    found = []
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        target = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4]).strip("/")
        if source.split(" ")[0] in _VOLATILE and target.startswith(tuple(f"{place}/" for place in places)):
            found.append(target)
    return found


def _covered(shown: Sequence[str], host: Path) -> Iterator[str]:
    for name in _COVERED:
        if name.partition("/")[0] in shown and (host / name).is_dir() and not (host / name).is_symlink():
            yield name
    if host == Path("/"):
        yield from volatile_mounts(Path("/proc/self/mountinfo").read_text(), shown)


def _copy(source: Path, target: Path) -> None:
    """Copy what everybody may read; links stay links."""
    try:
        found = source.lstat()
    except FileNotFoundError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o005 == 0o005:
        target.mkdir(mode=0o755, exist_ok=True)
        for inner in source.iterdir():
            _copy(inner, target / inner.name)
    elif stat.S_ISREG(found.st_mode) and found.st_mode & 0o004 and found.st_size <= _MOST_BYTES:
        shutil.copyfile(source, target)
        target.chmod(0o755 if found.st_mode & 0o001 else 0o644)


def _give(directory: Path, ids: IdMap) -> None:
    """Give the files to the sandboxes' users, where that is another one than this."""
    if not situation().is_privileged:
        return
    owner, group = ids.outside(0), ids.outside_group(0)
    for path in (directory, *directory.rglob("*")):
        os.chown(path, owner, group, follow_symlinks=False)
    if ids.has(_OWN_USER, _OWN_USER):
        os.chown(directory / "home/user", ids.outside(_OWN_USER), ids.outside_group(_OWN_USER))
