"""What is in a directory, as plain data: for comparisons of trees that different programs made."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "character",
    stat.S_IFBLK: "block",
    stat.S_IFSOCK: "socket",
}


def tree_of(root: str, *, shift: int = 0) -> dict[str, dict[str, Any]]:
    """All files below a directory, by their names in it: kind, mode, owner, content, time, attributes, hard links.

    Args:
        shift: What users and groups have more than inside.
    """
    found: dict[str, dict[str, Any]] = {}
    linked: dict[tuple[int, int], list[str]] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        for name in [*folders, *files]:
            path = folder + b"/" + name
            below = os.path.relpath(path, os.fsencode(root)).decode("utf-8", "surrogateescape")
            status = os.lstat(path)
            one: dict[str, Any] = {
                "kind": _KINDS[stat.S_IFMT(status.st_mode)],
                "mode": oct(stat.S_IMODE(status.st_mode)),
                "uid": status.st_uid - shift,
                "gid": status.st_gid - shift,
            }
            if stat.S_ISREG(status.st_mode):
                with Path(os.fsdecode(path)).open("rb") as file:
                    one["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                one["size"] = status.st_size
            if stat.S_ISLNK(status.st_mode):
                one["target"] = str(Path(os.fsdecode(path)).readlink())
            if not stat.S_ISDIR(status.st_mode):
                one["mtime"] = status.st_mtime_ns
                linked.setdefault((status.st_dev, status.st_ino), []).append(below)
            attributes = {
                key: os.getxattr(path, key, follow_symlinks=False).hex()
                for key in os.listxattr(path, follow_symlinks=False)
                if not key.startswith(("user.overlay.", "security.selinux"))
            }
            if attributes:
                one["attributes"] = attributes
            found[below] = one
    for names in linked.values():
        for one_name in names:
            found[one_name]["links"] = min(names)
    return found
