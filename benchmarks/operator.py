"""The operator among a thousand RolloutJobs, on a real API server: how soon, how large, how many writes.

Jobs arrive at a steady rate and stay. No pods run: this program says of every Deployment that it is ready and of every
Job that it is done, as the cluster's controllers would, and watches what the operator makes of it. Measured are the
seconds from a change, as this program's own watch sees it, to the status that follows from it; the operator's own
histograms; its resident memory; and its writes per job, from its /metrics.

Needs etcd and kube-apiserver in KUBEBUILDER_ASSETS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.api import Api, ApiError, Object, condition, is_true
from tests.cluster.control_plane import ApiServer, MissingBinaries, start_api_server
from tests.cluster.jobs import rollout_job
from tests.cluster.operator_process import OperatorProcess, install

NAMESPACE = "benchmark"
WRITE_VERBS = frozenset({"create", "update", "patch", "delete"})
MIB = 1 << 20


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Controllers:
    """Says that what was asked for has come to be; keeps when, and when the operator had taken notice.

    Attributes:
        seconds: By what happened: from each change to the status that follows from it.
        complete: Names of jobs that are.
    """

    def __init__(self, api: Api, backend: str, pause: float) -> None:
        self._api, self._backend, self._pause = api, backend, pause
        self._since: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.complete: set[str] = set()
        self.failed: dict[str, str] = {}
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        kinds: dict[str, Callable[[Object], None]] = {
            "RolloutJob": self._rollout_job,
            "Job": self._job,
            "Deployment": self._deployment,
        }
        async with asyncio.TaskGroup() as tasks:
            for kind, seen in kinds.items():
                tasks.create_task(self._watch(kind, seen))

    async def _watch(self, kind: str, seen: Callable[[Object], None]) -> None:
        async for what, item in self._api.changes(kind, NAMESPACE):
            if what == "SYNC":
                for listed in item["items"]:
                    seen(listed)
            elif what != "DELETED":
                seen(item)

    def _rollout_job(self, item: Object) -> None:
        name = item["metadata"]["name"]
        if not item.get("status"):
            self._since.setdefault((name, "created"), time.perf_counter())
            return
        self._notice(name, "created")
        if is_true(item, "GenerationReady"):
            self._notice(name, "generation ready")
        if (condition(item, "WorkersReady") or {}).get("reason") == "ShardsDone":
            self._notice(name, "shards done")
        if is_true(item, "SuccessCriteriaMet"):
            self._notice(name, "finish done")
        if is_true(item, "Complete") and name not in self.complete:
            self.complete.add(name)
            self.changed.set()
        if is_true(item, "Failed"):
            self.failed[name] = str((condition(item, "Failed") or {}).get("message"))
            self.changed.set()

    def _notice(self, name: str, what: str) -> None:
        since = self._since.pop((name, what), None)
        if since is not None:
            self.seconds[what].append(time.perf_counter() - since)

    def _deployment(self, item: Object) -> None:
        if item.get("status", {}).get("readyReplicas") or not self._first(item):
            return
        replicas = item["spec"]["replicas"]
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {"observedGeneration": item["metadata"]["generation"], **dict.fromkeys(counts, replicas)}
        self._later(item, "generation ready", status)

    def _job(self, item: Object) -> None:
        if item["spec"].get("suspend") or condition(item, "Complete") or not self._first(item):
            return
        now, count = timestamp(), item["spec"]["completions"]
        kinds = ("SuccessCriteriaMet", "Complete")
        status: Object = {
            "startTime": now,
            "completionTime": now,
            "succeeded": count,
            "conditions": [
                {"type": kind, "status": "True", "reason": "CompletionsReached", "lastTransitionTime": now}
                for kind in kinds
            ],
        }
        if item["spec"].get("completionMode") == "Indexed":
            status["completedIndexes"] = "0" if count == 1 else f"0-{count - 1}"
        what = "finish done" if item["metadata"]["name"].endswith("-finish") else "shards done"
        self._later(item, what, status)

    def _first(self, item: Object) -> bool:
        uid = item["metadata"]["uid"]
        if uid in self._told:
            return False
        self._told.add(uid)
        return True

    def _later(self, item: Object, what: str, status: Object) -> None:
        async def tell() -> None:
            await asyncio.sleep(self._pause)
            job = item["metadata"]["labels"]["kuberoll.io/job"]
            kind, name = item["kind"] if "kind" in item else _kind(item), item["metadata"]["name"]
            self._since[job, what] = time.perf_counter()
            with contextlib.suppress(ApiError):
                await self._api.patch(kind, NAMESPACE, name, {"status": status}, subresource="status")

        task = asyncio.create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kind(item: Object) -> str:
    return "Job" if "completions" in item["spec"] else "Deployment"


def quantile(values: Iterable[float], part: float) -> float:
    """The value that so large a part is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def samples_of(metrics: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of a metric's samples."""
    found = []
    for labels, value in re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", metrics, re.MULTILINE):
        found.append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def bucket_quantile(metrics: str, name: str, part: float) -> float:
    """The upper bound of the bucket that the quantile is in."""
    buckets = sorted((float(labels["le"]), value) for labels, value in samples_of(metrics, f"{name}_bucket"))
    return next(bound for bound, value in buckets if value >= part * buckets[-1][1])


def job_of(number: int, backend: str) -> Object:
    generation: Object = {"backend": backend}
    if backend == "External":
        generation["external"] = {"url": "http://127.0.0.1:9"}
    return rollout_job(NAMESPACE, f"job-{number:05d}", light=False, gpus=0, generation=generation)


async def arrive(api: Api, count: int, rate: float, backend: str) -> None:
    """Creates jobs at a steady rate, whatever the API server's answers take."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.create_task(_ignored(api.create(job_of(number, backend))))


async def _ignored(work: Awaitable[Any]) -> None:
    await work


async def measure(server: ApiServer, directory: Path, arguments: argparse.Namespace) -> None:
    """One run."""
    async with Api(server.url, server.token, server.authority) as api:
        token = await install(api)
        await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        operator = OperatorProcess(
            directory,
            server.url,
            token,
            namespace=None,
            authority=server.authority,
            settings={"lease_seconds": 15, "progress_seconds": 15},
        )
        operator.start()
        process = psutil.Process(operator.process.process.pid)
        idle, controllers = process.memory_info().rss, Controllers(api, arguments.backend, arguments.pause)
        watching = asyncio.create_task(controllers.run())
        try:
            began, before = time.perf_counter(), process.cpu_times()
            largest = idle
            arriving = asyncio.create_task(arrive(api, arguments.jobs, arguments.rate, arguments.backend))
            while len(controllers.complete) + len(controllers.failed) < arguments.jobs:
                controllers.changed.clear()
                if arriving.done():
                    arriving.result()
                if watching.done():
                    watching.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(controllers.changed.wait(), 1)
                largest = max(largest, process.memory_info().rss)
                if not operator.is_running():
                    raise SystemExit(operator.process.tail())
                if time.perf_counter() - began > arguments.seconds:
                    raise SystemExit(f"{len(controllers.complete)} jobs are complete; {controllers.failed}")
            wall, after = time.perf_counter() - began, process.cpu_times()
            _, metrics = operator.get("/metrics")
            report(arguments, controllers, metrics, wall)
            cpu = after.user + after.system - before.user - before.system
            print(
                f"operator: {cpu / arguments.jobs * 1e3:.1f} ms CPU per job; resident {idle / MIB:.0f} MiB when idle,"
            )
            print(f"  {largest / MIB:.0f} MiB at most with {arguments.jobs} jobs in its cache (bound: 250 MB)")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            operator.stop()


def report(arguments: argparse.Namespace, controllers: Controllers, metrics: str, wall: float) -> None:
    """Prints what was measured."""
    print(
        f"{arguments.jobs} jobs, backend {arguments.backend}, {arguments.rate:g} a second: {wall:.0f} s; "
        f"complete {len(controllers.complete)}, failed {len(controllers.failed)}"
    )
    for name, cause in list(controllers.failed.items())[:3]:
        print(f"  {name}: {cause}")
    print("seconds from a change to the status that follows      p50     p99     max     n")
    everything = [value for values in controllers.seconds.values() for value in values]
    for what, values in [*controllers.seconds.items(), ("all", everything)]:
        if values:
            middle, tail = quantile(values, 0.5), quantile(values, 0.99)
            print(f"  {what:<48} {middle:7.3f} {tail:7.3f} {max(values):7.3f} {len(values):5d}")
    waits = bucket_quantile(metrics, "kuberoll_operator_queue_wait_seconds", 0.99)
    lasts = bucket_quantile(metrics, "kuberoll_operator_reconcile_seconds", 0.99)
    print(f"  the operator's own: p99 in the queue at most {waits:g}, of a reconcile at most {lasts:g}")
    writes: Counter[tuple[str, str]] = Counter()
    refused = 0.0
    for labels, value in samples_of(metrics, "kuberoll_operator_api_requests_total"):
        if labels["verb"] in WRITE_VERBS and labels["kind"] != "Lease":
            writes[labels["kind"], labels["verb"]] += int(value)
            refused += value if int(labels["code"]) >= 300 else 0
    print(f"writes per job: {writes.total() / arguments.jobs:.2f} (bound: 25), refused: {refused:g} in all")
    for (kind, verb), count in writes.most_common():
        print(f"  {kind:<16} {verb:<8} {count / arguments.jobs:6.2f}")
    reads = sum(
        value
        for labels, value in samples_of(metrics, "kuberoll_operator_api_requests_total")
        if labels["verb"] not in WRITE_VERBS
    )
    print(f"reads per job: {reads / arguments.jobs:.2f}")


def main() -> None:
    """The command's entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=5.0, help="jobs that arrive in a second")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that everything else takes")
    parser.add_argument("--backend", choices=["Native", "External"], default="Native")
    parser.add_argument("--seconds", type=float, default=1800, help="give up after so long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            server = start_api_server(Path(directory))
        except MissingBinaries as missing:
            print(f"skipped: {missing}")
            sys.exit(0)
        try:
            asyncio.run(measure(server, Path(directory), arguments))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
