"""Users of a sandbox, as its own files name them: its C library may be another one, or none."""

from __future__ import annotations

from typing import NamedTuple

_PASSWD, _GROUP = "/etc/passwd", "/etc/group"


class UnknownUser(ValueError):
    """The sandbox has no such user or group."""


class User(NamedTuple):
    """Whom a process runs as.

    Attributes:
        uid, gid: Numbers.
        groups: Further groups.
        name: Its name; empty for a number without an entry.
        home: Its home directory.
    """

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str = ""
    home: str = "/"


_at_start: dict[str, list[list[str]]] = {}
"""Entries of the files as they were when the server began."""


def remember() -> None:
    """Keep whom the image names: an agent that deletes them ends nobody else's commands."""
    _at_start.update({_PASSWD: _entries(_PASSWD, 7), _GROUP: _entries(_GROUP, 4)})


def find(text: str) -> User:
    """The user that an image or a request names: `name`, `uid`, `name:group` or `uid:gid`, as in a Dockerfile's USER.

    Raises:
        UnknownUser: It is not there, and was not when the server began.
    """
    user, _, group = text.partition(":")
    entries = [*_entries(_PASSWD, 7), *_at_start.get(_PASSWD, ())]
    found = next((entry for entry in entries if entry[0] == user), None)
    if found is None and user.isdecimal():
        found = next((entry for entry in entries if entry[2] == user), ["", "", user, "0", "", "/", ""])
    if found is None:
        raise UnknownUser(f"the image has no user {user!r} in {_PASSWD}")
    gid = int(found[3])
    if group:
        gid = _group(group)
    groups = tuple(int(entry[2]) for entry in _groups() if found[0] and found[0] in entry[3].split(","))
    return User(uid=int(found[2]), gid=gid, groups=groups, name=found[0], home=found[5] or "/")


def _group(text: str) -> int:
    if text.isdecimal():
        return int(text)
    for entry in (*_groups(), *_at_start.get(_GROUP, ())):
        if entry[0] == text:
            return int(entry[2])
    raise UnknownUser(f"the image has no group {text!r} in {_GROUP}")


def _groups() -> list[list[str]]:
    return _entries(_GROUP, 4) or _at_start.get(_GROUP, [])


def _entries(path: str, fields: int) -> list[list[str]]:
    """Lines of a file of the kind of /etc/passwd that are complete."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []
    return [line for line in lines if len(line) >= fields and line[2].isdecimal() and _number(line, fields)]


def _number(line: list[str], fields: int) -> bool:
    return fields < 7 or line[3].isdecimal()
