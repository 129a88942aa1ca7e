"""Users and groups that a machine can have: ids in its user namespace, and what they are outside.

`user_namespaces(7)`, `subuid(5)` and `newuidmap(1)` have the rules.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

IDS: Final = 65536
"""Ids of a machine at most: what images are made for, with `nobody` at 65534."""

BASE: Final = 1_966_080_000
"""First id outside, for root without an entry in `/etc/subuid`. No distribution gives users, services or containers ids
from 1879048192 to 2147352575: they are "unused" in the table of systemd's UIDS-GIDS."""

_CHOWN, _DAC_OVERRIDE, _FOWNER, _SETGID, _SETUID, _SETFCAP = 0, 1, 3, 6, 7, 31
PRIVILEGES: Final = frozenset({_CHOWN, _DAC_OVERRIDE, _FOWNER, _SETGID, _SETUID, _SETFCAP})
"""Numbers of the capabilities with which root gives ids away that are not its own."""

SYSCTLS: Final = (
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
    "user.max_user_namespaces",
)
"""Settings of the kernel, and of distributions, that keep users from having namespaces."""

_SECONDS: Final = 30


class UserNamespacesUnavailable(RuntimeError):
    """This process can have no user namespace with such ids; the message has the reason and the way out."""


@dataclass(frozen=True, slots=True)
class IdRange:
    """Ids inside of a user namespace, and the ids in this one that they are."""

    inside: int
    outside: int
    count: int

    def __post_init__(self) -> None:
        if self.inside < 0 or self.outside < 0 or self.count < 1:
            raise ValueError(f"{self.inside} {self.outside} {self.count} is no range of ids")


@dataclass(frozen=True, slots=True)
class IdMap:
    """Users and groups of a machine.

    Attributes:
        users, groups: Ranges, of which none overlap.
        single_because: Why the machine has no more than one user; empty if it has.
    """

    users: tuple[IdRange, ...]
    groups: tuple[IdRange, ...]
    single_because: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for kind, ranges in (("users", self.users), ("groups", self.groups)):
            if not ranges:
                raise ValueError(f"a machine needs {kind}")
            for spans in (_spans(ranges, "inside"), _spans(ranges, "outside")):
                if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
                    raise ValueError(f"ranges of {kind} overlap")

    @property
    def count(self) -> int:
        """Number of users."""
        return sum(item.count for item in self.users)

    def has(self, uid: int, gid: int = 0) -> bool:
        """True if a machine has this user and this group."""
        return _find(self.users, uid) is not None and _find(self.groups, gid) is not None

    def outside(self, uid: int) -> int:
        """What a machine's user is outside.

        Raises:
            LookupError: It has no such user.
        """
        return self._outside(self.users, uid, "user")

    def outside_group(self, gid: int) -> int:
        """What a machine's group is outside.

        Raises:
            LookupError: It has no such group.
        """
        return self._outside(self.groups, gid, "group")

    def _outside(self, ranges: Sequence[IdRange], number: int, kind: str) -> int:
        if (found := _find(ranges, number)) is not None:
            return found
        why = f": {self.single_because}" if self.single_because else ""
        raise LookupError(f"the machine has no {kind} {number}, but {_words(ranges)}{why}")

    def text(self) -> str:
        """The same map as a word: equal for equal maps."""
        return ";".join(
            ",".join(f"{item.inside}-{item.outside}-{item.count}" for item in ranges)
            for ranges in (self.users, self.groups)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What decides which ids a machine can have.

    Attributes:
        capabilities: Numbers of those in effect.
        existing_users, existing_groups: Ids of this process's user namespace: first, and count.
        subordinate_users, subordinate_groups: Ranges that `/etc/subuid` and `/etc/subgid` give this user.
        programs: Whether `newuidmap` and `newgidmap` are installed and may do it.
        no_new_privileges: Whether programs have no more rights than who starts them.
    """

    uid: int
    gid: int
    capabilities: frozenset[int] = frozenset()
    existing_users: tuple[tuple[int, int], ...] = ((0, 2**32 - 1),)
    existing_groups: tuple[tuple[int, int], ...] = ((0, 2**32 - 1),)
    subordinate_users: tuple[tuple[int, int], ...] = ()
    subordinate_groups: tuple[tuple[int, int], ...] = ()
    programs: bool = False
    no_new_privileges: bool = False

    @property
    def is_privileged(self) -> bool:
        """True for root with the capabilities that it takes."""
        return self.uid == 0 and self.capabilities >= PRIVILEGES


def id_map() -> IdMap:
    """The users and groups that machines of this process can have."""
    return decide(situation())


def decide(facts: Situation) -> IdMap:
    """The users and groups that a machine can have.

    Root gives `IDS` ids that nobody has: those that `/etc/subuid` gives to it, else from `BASE` on; where these do not
    exist, because it is root in a user namespace, others of that namespace. An ordinary user is the machine's root, and
    its further users are those that `/etc/subuid` gives; without any, root is the only one.
    """
    users, groups = facts.existing_users, facts.existing_groups
    given_users = _without(_common(facts.subordinate_users, users), facts.uid)
    given_groups = _without(_common(facts.subordinate_groups, groups), facts.gid)
    if facts.is_privileged:
        if all(sum(count for _, count in given) >= IDS for given in (given_users, given_groups)):
            return IdMap(_shifted(given_users, IDS), _shifted(given_groups, IDS))
        if (base := _free(users, groups)) is not None:
            return IdMap((IdRange(0, base, IDS),), (IdRange(0, base, IDS),))
        # In a small user namespace root is root outside of machines, too, as an ordinary user is.
        given_users, given_groups = _without(users, facts.uid), _without(groups, facts.gid)
        if given_users and given_groups:
            return IdMap(_own(facts.uid, given_users), _own(facts.gid, given_groups))
        why = "the user namespace of this process has no further ids: /proc/self/uid_map, /proc/self/gid_map"
    elif not (given_users and given_groups):
        why = "/etc/subuid and /etc/subgid have no ids for this user: `usermod --add-subuids 100000-165535 "
        why += "--add-subgids 100000-165535 USER` as root gives some"
        if facts.uid == 0:
            why = "this root lacks capabilities to change owners, users and groups (CapEff of /proc/self/status)"
    elif facts.no_new_privileges:
        why = "this process may get no new privileges (no_new_privs), so that newuidmap can do nothing for it"
    elif not facts.programs:
        why = "newuidmap and newgidmap are not there, or not setuid root: install the package uidmap (shadow-utils)"
    else:
        return IdMap(_own(facts.uid, given_users), _own(facts.gid, given_groups))
    return IdMap((IdRange(0, facts.uid, 1),), (IdRange(0, facts.gid, 1),), why)


def situation() -> Situation:
    """What decides for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    bits = int(status["CapEff"], 16)
    uid = os.geteuid()
    names = {str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    return Situation(
        uid=uid,
        gid=os.getegid(),
        capabilities=frozenset(number for number in range(64) if bits >> number & 1),
        existing_users=existing_ids(Path("/proc/self/uid_map").read_text()),
        existing_groups=existing_ids(Path("/proc/self/gid_map").read_text()),
        subordinate_users=subordinate_ids(_read("/etc/subuid"), names),
        subordinate_groups=subordinate_ids(_read("/etc/subgid"), names),
        programs=_may_map("newuidmap") and _may_map("newgidmap"),
        no_new_privileges=status.get("NoNewPrivs", "0").strip() == "1",
    )


def existing_ids(text: str) -> tuple[tuple[int, int], ...]:
    """Ids that a user namespace has, by its `/proc/PID/uid_map`: of each range the first, and the count."""
    return tuple(sorted((int(line.split()[0]), int(line.split()[2])) for line in text.splitlines() if line.strip()))


def subordinate_ids(text: str, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Ranges that `/etc/subuid` or `/etc/subgid` give to a user, in its order; lines that are wrong are passed over.

    Args:
        names: Its name and its number.
    """
    found, names = [], set(names)
    for line in text.splitlines():
        name, _, rest = line.strip().partition(":")
        first, _, count = rest.partition(":")
        if name in names and first.isdecimal() and count.isdecimal() and int(count):
            found.append((int(first), int(count)))
    return tuple(found)


def write_maps(pid: int, ids: IdMap) -> None:
    """Give a process that has just entered a user namespace of its own the users and groups.

    Raises:
        UserNamespacesUnavailable: The kernel, `newuidmap` or `newgidmap` refuse.
    """
    try:
        if situation().is_privileged:
            _write(pid, "uid_map", _lines(ids.users))
            _write(pid, "gid_map", _lines(ids.groups))
        elif ids.count == 1:
            # The kernel lets nobody without rights give up a group that denies them something.
            _write(pid, "setgroups", "deny")
            _write(pid, "uid_map", _lines(ids.users))
            _write(pid, "gid_map", _lines(ids.groups))
        else:
            _ask("newuidmap", pid, ids.users)
            _ask("newgidmap", pid, ids.groups)
    except OSError as error:
        raise unavailable(error) from error


def unavailable(error: OSError) -> UserNamespacesUnavailable:
    """What to tell about a call that the kernel refused: `unshare`, `clone` or the writing of a map."""
    return UserNamespacesUnavailable(explanation(error, {name: _sysctl(name) for name in SYSCTLS}))


def explanation(error: OSError, sysctls: Mapping[str, str | None]) -> str:
    """Why there is no user namespace, and the way out.

    Args:
        sysctls: Values of `SYSCTLS`; None: this system has no such setting.
    """
    said = f"no user namespace for a machine: {error.strerror or error}"
    if error.filename:
        said += f" ({error.filename})"
    for name, bad, good in zip(SYSCTLS, ("0", "1", "0"), ("1", "0", "15000"), strict=True):
        if (sysctls.get(name) or "").strip() == bad:
            return f"{said}; {name} is {bad}: as root `sysctl -w {name}={good}` permits it"
    match error.errno:
        case errno.ENOSPC | errno.EUSERS:
            return f"{said}; too many are there (user.max_user_namespaces), or they are 32 deep"
        case errno.EPERM | errno.EACCES:
            return (
                f"{said}; in a container its seccomp profile or missing capabilities forbid it: permit `unshare` and "
                "`mount` in user namespaces (Docker: --security-opt seccomp=unconfined --security-opt "
                "apparmor=unconfined), or use Docker's API for machines"
            )
        case errno.EINVAL:
            return f"{said}; ids of the map do not exist here (/proc/self/uid_map), or the kernel has no CONFIG_USER_NS"
    return said


def _lines(ranges: Iterable[IdRange]) -> str:
    return "".join(f"{item.inside} {item.outside} {item.count}\n" for item in ranges)


def _write(pid: int, name: str, text: str) -> None:
    # The kernel takes a map in one call.
    with Path(f"/proc/{pid}/{name}").open("wb", buffering=0) as file:
        try:
            file.write(text.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from error


def _ask(program: str, pid: int, ranges: Iterable[IdRange]) -> None:
    numbers = [str(number) for item in ranges for number in (item.inside, item.outside, item.count)]
    try:
        done = subprocess.run(
            [program, str(pid), *numbers], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserNamespacesUnavailable(
            f"no user namespace for a machine: {program}: {error}; the package uidmap (shadow-utils) has it"
        ) from error
    if done.returncode:
        file = "/etc/subuid" if program == "newuidmap" else "/etc/subgid"
        raise UserNamespacesUnavailable(
            f"no user namespace for a machine: {program} ended with {done.returncode}: {done.stderr.strip()[-500:]}; "
            f"{file} must have the ids, and {program} must be setuid root"
        )


def _find(ranges: Iterable[IdRange], number: int) -> int | None:
    for item in ranges:
        if item.inside <= number < item.inside + item.count:
            return item.outside + number - item.inside
    return None


def _words(ranges: Sequence[IdRange]) -> str:
    return ", ".join(
        f"{item.inside} to {item.inside + item.count - 1}" if item.count > 1 else str(item.inside) for item in ranges
    )


def _spans(ranges: Iterable[IdRange], side: str) -> list[tuple[int, int]]:
    return sorted((getattr(item, side), getattr(item, side) + item.count) for item in ranges)


def _common(given: Iterable[tuple[int, int]], existing: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What of the given ranges exists, each id once, in the given order."""
    left = list(existing)
    found = []
    for first, count in given:
        for begin, size in list(left):
            low, high = max(first, begin), min(first + count, begin + size)
            if low < high:
                found.append((low, high - low))
                left.remove((begin, size))
                left += [(a, b - a) for a, b in ((begin, low), (high, begin + size)) if a < b]
    return tuple(found)


def _without(ranges: Sequence[tuple[int, int]], number: int) -> tuple[tuple[int, int], ...]:
    parts = [(first, min(first + count, number)) for first, count in ranges]
    parts += [(max(first, number + 1), first + count) for first, count in ranges]
    return tuple(sorted({(low, high - low) for low, high in parts if low < high}))


def _shifted(ranges: Iterable[tuple[int, int]], most: int, first: int = 0) -> tuple[IdRange, ...]:
    """The ranges one after another from an id inside on, up to a number of ids."""
    found = []
    for outside, count in ranges:
        if size := min(count, most - first):
            found.append(IdRange(first, outside, size))
            first += size
    return tuple(found)


def _own(number: int, further: Iterable[tuple[int, int]]) -> tuple[IdRange, ...]:
    return (IdRange(0, number, 1), *_shifted(further, IDS, 1))


def _free(users: Iterable[tuple[int, int]], groups: Iterable[tuple[int, int]]) -> int | None:
    """First of `IDS` ids that exist and that nobody has: `BASE`, else the last multiple of `IDS` but 0."""
    both = _common(users, groups)
    if any(first <= BASE and first + count >= BASE + IDS for first, count in both):
        return BASE
    # Only where few exist: beside users of this machine there would be those of services and containers.
    if any(first + count > BASE for first, count in both):
        return None
    starts = [(first + count) // IDS * IDS - IDS for first, count in both]
    found = [start for start, (first, _) in zip(starts, both, strict=True) if start >= max(first, IDS)]
    return max(found, default=None)


def _may_map(program: str) -> bool:
    if (path := shutil.which(program)) is None:
        return False
    found = Path(path).stat()
    if found.st_mode & stat.S_ISUID and found.st_uid == 0:
        return True
    try:
        return bool(os.getxattr(path, "security.capability"))
    except OSError:
        return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _sysctl(name: str) -> str | None:
    return _read(f"/proc/sys/{name.replace('.', '/', 1)}") or None
