"""kopf and the cache: what is asked of the API server, and that what is gone is known to be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_operator import names
from kuberoll_operator.cache import Cache
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.resources import CHILDREN, PODS, ROLLOUT_JOBS
from kuberoll_operator.model import Key, Object
from kuberoll_operator.watches import SELECTOR, WATCHED, Watches, WatchesEnded
from tests.operator.emulator import Emulator, Fault
from tests.operator.support import NAMESPACE, manifest

KEY = Key(NAMESPACE, "puzzle")
DEPLOYMENTS = next(item for item in CHILDREN if item.kind == "Deployment")


def labelled(kind: str, name: str, job: str = "puzzle", **more: object) -> Object:
    """A child or pod of a job."""
    api_version = next(item.api_version for item in WATCHED if item.kind == kind)
    metadata = {"name": name, "namespace": NAMESPACE, "labels": names.labels(job, "generation")}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **more}


class Told:
    """Which jobs the cache told of."""

    def __init__(self) -> None:
        self.keys: asyncio.Queue[Key] = asyncio.Queue()
        self.cache = Cache(self.keys.put_nowait)

    async def until(self, key: Key, condition: Callable[[], object] = lambda: True) -> None:
        """Returns when it has told of a job and the condition is true."""
        while await self.keys.get() != key or not condition():
            pass


@asynccontextmanager
async def watching(server: Emulator, directory: Path, **options: object) -> AsyncIterator[tuple[Watches, Told]]:
    told = Told()
    async with server.running(directory) as kubeconfig:
        watches = Watches(told.cache, lambda: load_access(kubeconfig), **options)  # type: ignore[arg-type]
        task = asyncio.create_task(watches.run())
        try:
            synced = asyncio.create_task(watches.wait_synced())
            await asyncio.wait({task, synced}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                synced.cancel()
                task.result()
            await server.until(lambda: server.watching() >= {item.plural for item in WATCHED})
            yield watches, told
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_user_without_a_name_watches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise OSError("No username set in the environment")

    # As in a container whose user is in no /etc/passwd; Python 3.12 and older raise KeyError there.
    monkeypatch.setattr("getpass.getuser", no_name)
    server = Emulator()
    server.put(manifest())
    async with watching(server, tmp_path) as (watches, _):
        assert watches.unsynced() == []


async def test_selectors_are_the_servers_and_kopf_writes_nothing(tmp_path: Path) -> None:
    server = Emulator()
    server.put(manifest())
    server.put(labelled("Deployment", "puzzle-generation"))
    foreign = labelled("Deployment", "foreign")
    foreign["metadata"]["labels"] = {names.JOB_LABEL: "puzzle"}
    server.put(foreign)
    async with watching(server, tmp_path) as (watches, told):
        assert watches.unsynced() == []
        server.put(labelled("Pod", "puzzle-generation-1", spec={}, status={"phase": "Pending"}))
        await told.until(KEY, lambda: told.cache.pods(KEY))
        assert set(told.cache.children(KEY)) == {("Deployment", "puzzle-generation")}
    assert server.writes() == []
    for request in server.requests:
        if request.plural and request.plural != "rolloutjobs":
            assert request.query["labelSelector"] == SELECTOR
        elif request.plural:
            assert "labelSelector" not in request.query
    assert {item.plural for item in server.requests if "watch" in item.query} == {item.plural for item in WATCHED}


async def test_only_the_given_namespaces_are_asked_for(tmp_path: Path) -> None:
    server = Emulator()
    server.put(manifest())
    async with watching(server, tmp_path, namespaces=(NAMESPACE, "other")) as (_, told):
        assert [key for key, _ in told.cache.jobs()] == [KEY]
    asked = {tuple(item.path.split("/")[-3:-1]) for item in server.requests if item.plural}
    assert asked == {("namespaces", NAMESPACE), ("namespaces", "other")}


async def test_what_was_deleted_while_nobody_watched_is_gone_after_the_next_list(tmp_path: Path) -> None:
    server = Emulator()
    server.put(manifest())
    server.put(labelled("Deployment", "puzzle-generation"))
    async with watching(server, tmp_path) as (_, told):
        assert ("Deployment", "puzzle-generation") in told.cache.children(KEY)
        server.remove("deployments", NAMESPACE, "puzzle-generation", unseen=True)
        while not told.keys.empty():
            told.keys.get_nowait()
        server.end_watches(gone=True)
        await told.until(KEY, lambda: not told.cache.children(KEY))


async def test_a_watch_that_fails_for_good_ends_all_and_touches_nobody_elses_tasks(tmp_path: Path) -> None:
    server = Emulator()
    async with server.running(tmp_path) as kubeconfig:
        watches = Watches(Cache(lambda _: None), lambda: load_access(kubeconfig))
        task = asyncio.create_task(watches.run())
        await server.until(lambda: server.watching() >= {item.plural for item in WATCHED})
        other = asyncio.create_task(asyncio.Event().wait())
        server.fail_watch("rolloutjobs", 500)
        with pytest.raises(WatchesEnded, match="InternalError"):
            await task
        assert not other.done()
        other.cancel()


async def test_a_refused_list_is_asked_for_again_and_the_others_go_on(tmp_path: Path) -> None:
    server = Emulator()
    server.faults.append(Fault(lambda item: item.is_list and item.plural == "pods", 403))
    server.faults.append(Fault(lambda item: item.is_list and item.plural == "jobs", 503))
    async with watching(server, tmp_path) as (watches, _):
        assert watches.unsynced() == []


def versioned(kind: str, name: str, version: int, uid: str = "1") -> Object:
    item = labelled(kind, name)
    item["metadata"] |= {"resourceVersion": str(version), "uid": uid}
    return item


def test_what_a_worker_said_at_its_end_outlives_its_pod() -> None:
    cache = Cache(lambda _: None)

    def worker(name: str, version: int, phase: str, **container: object) -> Object:
        item = versioned("Pod", name, version)
        item["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "3"
        return {**item, "spec": {}, "status": {"phase": phase, "containerStatuses": [{"name": "worker", **container}]}}

    cache.add_event(PODS, worker("a", 1, "Running"), deleted=False)
    # Between its end and its removal nothing need have been seen.
    cache.add_event(PODS, worker("a", 2, "Failed", state={"terminated": {"message": "first"}}), deleted=True)
    assert cache.pods(KEY) == []
    [gone] = cache.departed(KEY)
    assert gone["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "first"
    cache.add_event(PODS, worker("b", 3, "Running"), deleted=False)
    cache.add_event(PODS, worker("b", 4, "Failed", state={"terminated": {"message": "second"}}), deleted=True)
    # One that was never started says nothing.
    cache.add_event(PODS, worker("c", 5, "Pending"), deleted=False)
    cache.add_event(PODS, worker("c", 6, "Pending"), deleted=True)
    assert [item["metadata"]["name"] for item in cache.departed(KEY)] == ["b"]
    job = manifest()
    job["metadata"] |= {"resourceVersion": "7", "uid": "9"}
    cache.add_event(ROLLOUT_JOBS, job, deleted=False)
    cache.add_event(ROLLOUT_JOBS, job, deleted=True)
    assert cache.departed(KEY) == []


def test_older_events_change_nothing_and_own_writes_are_no_news() -> None:
    told: list[Key] = []
    cache = Cache(told.append)
    cache.add_written(DEPLOYMENTS, versioned("Deployment", "a", 5))
    assert told == []
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 5), deleted=False)
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 4), deleted=False)
    assert told == []
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 6), deleted=False)
    assert told == [KEY]
    # The deletion of a predecessor.
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 7, uid="0"), deleted=True)
    assert cache.children(KEY)
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 8), deleted=True)
    assert not cache.children(KEY)


def test_what_is_older_than_the_list_and_not_on_it_has_been_deleted() -> None:
    cache = Cache(lambda _: None)
    cache.add_page(DEPLOYMENTS, None, [versioned("Deployment", "a", 3)], "10", last=True)
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "b", 9), deleted=False)
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "c", 11), deleted=False)
    assert {name for _, name in cache.children(KEY)} == {"a", "c"}


def test_what_was_written_after_the_list_was_made_stays() -> None:
    cache = Cache(lambda _: None)
    cache.add_written(DEPLOYMENTS, versioned("Deployment", "new", 12))
    cache.add_page(DEPLOYMENTS, None, [], "10", last=True)
    assert cache.children(KEY)


def test_a_list_that_was_broken_off_leaves_nothing_behind() -> None:
    cache = Cache(lambda _: None)
    both = [versioned("Deployment", "a", 3), versioned("Deployment", "b", 4)]
    cache.add_page(DEPLOYMENTS, None, both[:1], "10", first=True, last=False)
    # Its second page never came, and "a" was deleted before the next list.
    cache.add_page(DEPLOYMENTS, None, both[1:], "12", first=True, last=True)
    assert {name for _, name in cache.children(KEY)} == {"b"}
    cache.add_page(DEPLOYMENTS, None, both[:1], "14", first=True, last=False)
    cache.add_page(DEPLOYMENTS, None, both[1:], "14", first=False, last=True)
    assert {name for _, name in cache.children(KEY)} == {"a", "b"}


def test_a_history_that_was_restored_from_a_backup_replaces_what_was_seen() -> None:
    cache = Cache(lambda _: None)
    seen = [versioned("Deployment", "a", 900, "1"), versioned("Deployment", "gone", 950, "2")]
    cache.add_page(DEPLOYMENTS, None, seen, "1000", last=True)
    restored = versioned("Deployment", "a", 400, "1") | {"spec": {"replicas": 7}}
    cache.add_page(DEPLOYMENTS, None, [restored], "500", last=True)
    assert {name: item["spec"] for (_, name), item in cache.children(KEY).items()} == {"a": {"replicas": 7}}
    # What happens from there on is new, although its versions were seen before.
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "a", 501, "1"), deleted=False)
    cache.add_event(DEPLOYMENTS, versioned("Deployment", "b", 502, "3"), deleted=False)
    assert {name: item["metadata"]["resourceVersion"] for (_, name), item in cache.children(KEY).items()} == {
        "a": "501",
        "b": "502",
    }


@given(st.data())
def test_whatever_the_order_of_lists_and_events_the_end_is_the_truth(data: st.DataObject) -> None:
    """A server's history, its events delivered late and in part, then a list."""
    history: list[tuple[int, str, str, bool]] = []
    alive: dict[str, str] = {}
    for version in range(1, data.draw(st.integers(1, 12)) + 1):
        name = data.draw(st.sampled_from("abc"))
        if name in alive and data.draw(st.booleans()):
            history.append((version, name, alive.pop(name), True))
        else:
            alive.setdefault(name, str(version))
            history.append((version, name, alive[name], False))
    cache = Cache(lambda _: None)
    cut = data.draw(st.integers(0, len(history)))
    late = data.draw(st.lists(st.sampled_from(history[:cut]), unique=True)) if cut else []
    now: dict[str, tuple[int, str]] = {}
    for version, name, uid, deleted in history[:cut]:
        if data.draw(st.booleans()):
            cache.add_event(DEPLOYMENTS, versioned("Deployment", name, version, uid), deleted=deleted)
        if deleted:
            now.pop(name, None)
        else:
            now[name] = (version, uid)
        if data.draw(st.booleans()):
            # A list that is broken off after its first page.
            page = [versioned("Deployment", name, version, uid) for name, (version, uid) in now.items()]
            cache.add_page(DEPLOYMENTS, None, page[:1], str(version), first=True, last=False)
    items = [versioned("Deployment", name, version, uid) for name, (version, uid) in now.items()]
    cache.add_page(DEPLOYMENTS, None, items, str(cut), last=True)
    # What still lay in a queue when the list came.
    for version, name, uid, deleted in late:
        cache.add_event(DEPLOYMENTS, versioned("Deployment", name, version, uid), deleted=deleted)
    for version, name, uid, deleted in history[cut:]:
        cache.add_event(DEPLOYMENTS, versioned("Deployment", name, version, uid), deleted=deleted)
    known = {name: item["metadata"]["uid"] for (_, name), item in cache.children(KEY).items()}
    assert known == alive


def test_pods_are_kept_without_what_nobody_reads() -> None:
    cache = Cache(lambda _: None)
    pod = versioned("Pod", "a", 1) | {"spec": {"containers": [{}], "nodeName": "n"}, "status": {"phase": "Running"}}
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    cache.add_written(PODS, pod)
    (kept,) = cache.pods(KEY)
    assert kept["spec"] == {"nodeName": "n"}
    assert "managedFields" not in kept["metadata"]
    assert "managedFields" in pod["metadata"]
