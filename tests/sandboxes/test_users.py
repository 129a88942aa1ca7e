"""Users of machines: what is decided from what, and that the kernel takes the maps."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.users import (
    BASE,
    IDS,
    PRIVILEGES,
    SYSCTLS,
    IdMap,
    IdRange,
    Situation,
    decide,
    existing_ids,
    explanation,
    id_map,
    subordinate_ids,
)
from tests.sandboxes.namespaces import inside
from tests.sandboxes.people import SUBORDINATE, USER, ordinary

ALL = ((0, 2**32 - 1),)
ROOT: dict[str, Any] = {"uid": 0, "gid": 0, "capabilities": PRIVILEGES}

ranges = st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 100_000)), max_size=4).map(tuple)


@st.composite
def disjoint(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Ranges of a namespace's ids; the kernel lets none overlap."""
    edges = sorted(draw(st.sets(st.integers(0, 4_000_000_000), min_size=2, max_size=8)))
    return tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False))


situations = st.builds(
    Situation,
    uid=st.sampled_from([0, 1000, 70_000]),
    gid=st.sampled_from([0, 1000, 70_000]),
    capabilities=st.sampled_from([frozenset(), PRIVILEGES]),
    existing_users=st.one_of(st.just(ALL), disjoint()),
    existing_groups=st.one_of(st.just(ALL), disjoint()),
    subordinate_users=ranges,
    subordinate_groups=ranges,
    programs=st.booleans(),
    no_new_privileges=st.booleans(),
)


@given(situations)
def test_every_situation_has_ids_that_exist(facts: Situation) -> None:
    found = decide(facts)
    assert found.has(0, 0)
    assert 1 <= found.count <= IDS
    for ranges, existing, own in (
        (found.users, facts.existing_users, facts.uid),
        (found.groups, facts.existing_groups, facts.gid),
    ):
        for item in ranges:
            assert item.outside == own or any(
                first <= item.outside and item.outside + item.count <= first + count for first, count in existing
            )
    if not facts.is_privileged:
        assert (found.outside(0), found.outside_group(0)) == (facts.uid, facts.gid)
        assert {item.outside for item in found.users} <= {facts.uid} or facts.programs
    assert bool(found.single_because) == (found.count == 1)


def test_root_gives_ids_that_nobody_has() -> None:
    found = decide(Situation(**ROOT))
    assert (found.count, found.outside(0), found.outside(1000), found.outside_group(65534)) == (
        IDS,
        BASE,
        BASE + 1000,
        BASE + 65534,
    )
    with pytest.raises(LookupError, match="no user 65536, but 0 to 65535"):
        found.outside(65536)


def test_root_takes_what_the_files_give() -> None:
    facts = Situation(**ROOT, subordinate_users=((100_000, 70_000),), subordinate_groups=((200_000, 65_536),))
    assert decide(facts).users == (IdRange(0, 100_000, IDS),)
    assert decide(facts).groups == (IdRange(0, 200_000, IDS),)


def test_root_of_a_namespace_takes_of_its_ids() -> None:
    # As in a container with a user namespace: 65536 ids, or more for containers within.
    small = Situation(**ROOT, existing_users=((0, 65_536),), existing_groups=((0, 65_536),))
    assert decide(small).users == (IdRange(0, 0, 1), IdRange(1, 1, 65_535))
    large = Situation(**ROOT, existing_users=((0, 200_000),), existing_groups=((0, 200_000),))
    assert decide(large).users == (IdRange(0, 131_072, IDS),)
    given_ids: dict[str, Any] = {f"subordinate_{kind}": ((100_000, 65_536),) for kind in ("users", "groups")}
    beyond = Situation(**ROOT, **given_ids, existing_users=((0, 65_536),), existing_groups=((0, 65_536),))
    assert decide(beyond) == decide(small)
    alone = Situation(**ROOT, existing_users=((0, 1),), existing_groups=((0, 1),))
    assert decide(alone).count == 1
    assert "no further ids" in decide(alone).single_because


def test_an_ordinary_user_is_root_inside() -> None:
    facts: dict[str, Any] = {"uid": 1000, "gid": 1001, "programs": True}
    given_ids: dict[str, Any] = {"subordinate_users": ((100_000, 65_536),), "subordinate_groups": ((300_000, 65_536),)}
    found = decide(Situation(**facts, **given_ids))
    assert found.users == (IdRange(0, 1000, 1), IdRange(1, 100_000, 65_535))
    assert found.groups == (IdRange(0, 1001, 1), IdRange(1, 300_000, 65_535))
    for changed, hint in (
        ({"programs": False}, "package uidmap"),
        ({"no_new_privileges": True}, "no_new_privs"),
        ({"subordinate_groups": ()}, "usermod --add-subuids"),
    ):
        single = decide(Situation(**{**facts, **given_ids, **changed}))
        assert single == IdMap((IdRange(0, 1000, 1),), (IdRange(0, 1001, 1),))
        assert hint in single.single_because
        with pytest.raises(LookupError, match=hint):
            single.outside(1)


def test_root_without_capabilities_has_a_single_id() -> None:
    found = decide(Situation(uid=0, gid=0, capabilities=frozenset({0})))
    assert found.users == (IdRange(0, 0, 1),)
    assert "lacks capabilities" in found.single_because


def test_files_are_read_by_name_and_number() -> None:
    text = "# none\nroot:100000:65536\nme:1:2\n1000:5:6\nme:x:7\nme:8\nme:9:0\n:1:1\n"
    assert subordinate_ids(text, {"me", "1000"}) == ((1, 2), (5, 6))
    assert existing_ids("         0          0 4294967295\n") == ALL
    assert existing_ids("1000 0 5\n 0 1 10\n") == ((0, 10), (1000, 5))


def test_maps_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        IdMap((IdRange(0, 10, 5), IdRange(4, 100, 5)), (IdRange(0, 0, 1),))
    with pytest.raises(ValueError, match="overlap"):
        IdMap((IdRange(0, 10, 5), IdRange(5, 12, 5)), (IdRange(0, 0, 1),))


@pytest.mark.parametrize(
    ("number", "sysctls", "hint"),
    [
        (errno.EPERM, {SYSCTLS[0]: "0\n"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        (errno.EACCES, {SYSCTLS[1]: "1\n"}, "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        (errno.ENOSPC, {SYSCTLS[2]: "0\n"}, "sysctl -w user.max_user_namespaces=15000"),
        (errno.ENOSPC, {SYSCTLS[2]: "96365\n"}, "too many"),
        (errno.EPERM, {}, "seccomp"),
        (errno.EINVAL, {}, "/proc/self/uid_map"),
    ],
)
def test_refusals_name_the_way_out(number: int, sysctls: dict[str, str], hint: str) -> None:
    assert hint in explanation(OSError(number, os.strerror(number)), {**dict.fromkeys(SYSCTLS), **sysctls})


def seen() -> list[object]:
    """What a process of a machine sees of its ids."""
    maps = [Path(f"/proc/self/{kind}_map").read_text().split() for kind in ("uid", "gid")]
    return [os.getuid(), os.getgid(), *maps]


@pytest.mark.slow
def test_the_kernel_takes_the_maps_of_this_user() -> None:
    ids = id_map()
    uid, gid, users, groups = inside(ids, seen)
    assert (uid, gid) == (0, 0)
    assert users == [str(number) for item in ids.users for number in (item.inside, item.outside, item.count)]
    assert groups == [str(number) for item in ids.groups for number in (item.inside, item.outside, item.count)]


PROGRAM = """
import json
from kuberoll_workers.sandboxes.users import id_map
from tests.sandboxes.namespaces import inside
from tests.sandboxes.test_users import seen
ids = id_map()
print(json.dumps([ids.count, ids.single_because, inside(ids, seen)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subordinate", "options", "count", "hint"),
    [
        (True, "", IDS, ""),
        (True, "--no-new-privs", 1, "no_new_privs"),
        (False, "", 1, "usermod --add-subuids"),
    ],
)
def test_the_kernel_takes_those_of_ordinary_users(subordinate: bool, options: str, count: int, hint: str) -> None:
    with ordinary(subordinate=subordinate) as person:
        done = person.run([sys.executable, "-c", PROGRAM], options=options)
    found, why, (uid, _, users, _) = json.loads(done.stdout)
    assert (found, uid) == (count, 0)
    assert hint in why
    own = ["0", str(USER), "1"]
    assert users == (own if count == 1 else [*own, "1", str(SUBORDINATE[0]), str(IDS - 1)])
