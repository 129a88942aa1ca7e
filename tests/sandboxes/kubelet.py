"""A kubelet for sandboxes: runs pods of the tests' API server in containers of Podman, as a kubelet would.

Its pods have one main container and init containers before it, emptyDirs that are directories of this machine, and an
address of Podman's network. What it knows of a pod is what the sandboxes' have. One thing is not in a container: the
init container with the workers' image, of which there is none here, runs its command on this machine, with the
directory of its volume in place of the mount's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kuberoll_api.sandboxes import RUNTIME_VARIABLE
from kuberoll_operator.model import Object
from kuberoll_operator.sandbox_pod import RUNTIME_CONTAINER
from tests.operator.emulator import Emulator
from tests.sandboxes.engines import Podman

_IMAGE: Final = re.compile(r"[a-z0-9][-._:@/a-zA-Z0-9]*")
_LOG_CHARACTERS: Final = 2048


class _Failed(Exception):
    """A container cannot be made; the message says why."""


class Kubelet:
    """Runs the pods of an API server.

    Args:
        place: Directory of its volumes.
        runtime: A runtime that is ready, as images of workers have one.
    """

    def __init__(self, server: Emulator, engine: Podman, place: Path, runtime: Path) -> None:
        self._server, self._engine, self._place, self._runtime = server, engine, place, runtime
        self._pods: dict[str, asyncio.Task[None]] = {}
        self._statuses: dict[str, Object] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run pods for the time of the block."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            for uid in list(self._pods):
                await self._end(uid)
            await asyncio.gather(watching, return_exceptions=True)

    def traces(self) -> set[str]:
        """Pods that it has; those that have ended are as good as directories."""
        found = {uid: (self._statuses.get(uid) or {}).get("phase") for uid in list(self._pods)}
        over = ("Failed", "Succeeded")
        return {f"directory of pod {uid}" if phase in over else f"pod {uid}" for uid, phase in found.items()}

    async def kill(self, uid: str) -> None:
        """Kill the main container of a pod."""
        await self._podman("kill", f"{uid}-sandbox")

    async def _watch(self) -> None:
        ending: set[asyncio.Task[None]] = set()
        while True:
            there = {pod["metadata"]["uid"]: pod for pod in self._server.all("pods")}
            for uid in self._pods.keys() - there.keys():
                task = asyncio.create_task(self._end(uid))
                ending.add(task)
                task.add_done_callback(ending.discard)
            for uid in there.keys() - self._pods.keys():
                self._pods[uid] = asyncio.create_task(self._run(there[uid]))
            known = set(there)
            await self._server.until(
                lambda known=known: {pod["metadata"]["uid"] for pod in self._server.all("pods")} != known or None  # type: ignore[misc]
            )

    async def _end(self, uid: str) -> None:
        task = self._pods.get(uid)
        if task is None or task.cancelling():
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        names = await self._podman("ps", "--all", "--quiet", f"--filter=label=pod={uid}")
        if names.split():
            await self._podman("rm", "--force", "--time=0", *names.split())
        shutil.rmtree(self._place / uid, ignore_errors=True)
        self._pods.pop(uid, None)

    async def _run(self, pod: Object) -> None:
        spec, uid = pod["spec"], pod["metadata"]["uid"]
        scheduled = {"type": "PodScheduled", "status": "True"}
        status: Object = {"phase": "Pending", "conditions": [scheduled], "initContainerStatuses": []}
        status["containerStatuses"] = [{"name": spec["containers"][0]["name"], "image": "", "state": {}}]
        self._say(pod, status)
        for volume in spec["volumes"]:
            (self._place / uid / volume["name"]).mkdir(parents=True)
            (self._place / uid / volume["name"]).chmod(0o777)
        for container in spec["initContainers"]:
            code, message = await self._initialize(pod, container, status)
            ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": message}
            status["initContainerStatuses"].append({"name": container["name"], "state": {"terminated": ended}})
            if code:
                self._say(pod, {**status, "phase": "Failed"})
                return
            self._say(pod, status)
        await self._main(pod, spec["containers"][0], status)

    async def _initialize(self, pod: Object, container: Object, status: Object) -> tuple[int, str]:
        if container["name"] == RUNTIME_CONTAINER:
            [mount] = container["volumeMounts"]
            place = self._place / pod["metadata"]["uid"] / mount["name"]
            words = [word.replace(mount["mountPath"], str(place)) for word in container["command"]]
            paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            variables = {**os.environ, "PATH": paths, RUNTIME_VARIABLE: str(self._runtime)}
            process = await asyncio.create_subprocess_exec(*words, env=variables, stderr=asyncio.subprocess.PIPE)
            _, errors = await process.communicate()
            return process.returncode or 0, errors.decode()
        await self._pull(pod, container, status)
        name = await self._create(pod, container, "--network=none")
        await self._podman("start", name)
        code = int(await self._podman("wait", name))
        return code, await self._message(pod, container, name, code)

    async def _main(self, pod: Object, container: Object, status: Object) -> None:
        await self._pull(pod, container, status)
        name = await self._create(pod, container)
        [said] = status["containerStatuses"]
        try:
            await self._podman("start", name)
        except _Failed as error:
            said["state"] = {"terminated": {"exitCode": 128, "reason": "StartError", "message": str(error)}}
            self._say(pod, {**status, "phase": "Failed"})
            return
        found: Object
        [found] = json.loads(await self._podman("inspect", name))
        said |= {"image": container["image"], "imageID": found["Image"], "state": {"running": {"startedAt": "now"}}}
        address = found["NetworkSettings"]["IPAddress"] or next(
            one["IPAddress"] for one in found["NetworkSettings"]["Networks"].values()
        )
        status |= {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self._say(pod, status)
        code = int(await self._podman("wait", name))
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        said["state"] = {"terminated": {**ended, "message": await self._message(pod, container, name, code)}}
        self._say(pod, {**status, "phase": "Succeeded" if code == 0 else "Failed"})

    async def _pull(self, pod: Object, container: Object, status: Object) -> None:
        """Have an image, however long that takes."""
        image = container["image"]
        while True:
            if not _IMAGE.fullmatch(image):
                reason, message = "InvalidImageName", f"couldn't parse image name {image!r}"
            else:
                try:
                    await self._podman("image", "exists", image)
                    return
                except _Failed:
                    try:
                        await self._podman("pull", "--quiet", "--retry=0", image)
                        return
                    except _Failed as error:
                        reason, message = "ErrImagePull", str(error)
            waiting = {"state": {"waiting": {"reason": reason, "message": message}}, "image": image}
            said = {"name": container["name"], **waiting}
            is_main = container["name"] == pod["spec"]["containers"][0]["name"]
            field = "containerStatuses" if is_main else "initContainerStatuses"
            kept = [one for one in status[field] if one["name"] != container["name"]]
            self._say(pod, {**status, field: [*kept, said]})
            await asyncio.sleep(1)

    async def _create(self, pod: Object, container: Object, *options: str) -> str:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        name = f"{uid}-{container['name']}"
        said = self._place / uid / f"{container['name']}.said"
        said.touch()
        said.chmod(0o666)
        volumes = [(str(said), "/dev/termination-log", False)] + [
            (str(self._place / uid / mount["name"]), mount["mountPath"], mount.get("readOnly", False))
            for mount in container["volumeMounts"]
        ]
        security, [program, *arguments] = container["securityContext"], container["command"]
        user = [f"--user={security['runAsUser']}:{security['runAsGroup']}"] if "runAsUser" in security else []
        limits = container.get("resources", {}).get("limits", {})
        await self._podman(
            "create",
            *(f"--name={name}", f"--label=pod={uid}", f"--hostname={spec['hostname']}", "--pull=never", *options),
            *("--systemd=false", "--http-proxy=false", "--no-healthcheck", "--image-volume=ignore"),
            # What Podman adds, and a kubelet does not.
            *("--unsetenv=container", "--unsetenv=TERM", "--read-only-tmpfs=false"),
            *user,
            *(f"--cap-drop={one}" for one in security["capabilities"].get("drop", ())),
            *(f"--cap-add={one}" for one in security["capabilities"].get("add", ())),
            *([] if security["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]),
            *(["--read-only"] if security.get("readOnlyRootFilesystem") else []),
            *_limits(limits),
            *(f"--env={item['name']}={_expanded(item['value'])}" for item in container.get("env", ())),
            *(f"--volume={source}:{target}{':ro' if fixed else ''}" for source, target, fixed in volumes),
            f"--entrypoint={json.dumps([_expanded(program)])}",
            container["image"],
            *map(_expanded, arguments),
        )
        return name

    async def _message(self, pod: Object, container: Object, name: str, code: int) -> str:
        said: str = (self._place / pod["metadata"]["uid"] / f"{container['name']}.said").read_text()
        if not said and code and container["terminationMessagePolicy"] == "FallbackToLogsOnError":
            said = (await self._podman("logs", name))[-_LOG_CHARACTERS:]
        return said

    def _say(self, pod: Object, status: Object) -> None:
        metadata = pod["metadata"]
        known = self._server.get("pods", metadata["namespace"], metadata["name"])
        self._statuses[metadata["uid"]] = status
        if known is not None and known["metadata"]["uid"] == metadata["uid"]:
            self._server.put({**known, "status": status})

    async def _podman(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._engine.podman(),
            *arguments,
            env=self._engine.variables(),
            # Conmon leaves a file where its engine works.
            cwd=self._place.parent,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                if arguments[0] == "wait":
                    process.kill()
            # A container that is being made is there afterwards, and can be removed.
            await process.wait()
            raise
        if process.returncode:
            raise _Failed(errors.decode().strip())
        # What containers write goes to both.
        return output.decode() + (errors.decode() if arguments[0] == "logs" else "")


def _expanded(text: str) -> str:
    """A text in which no variable is named, as a container gets it."""
    return text.replace("$$", "$")


def _limits(limits: dict[str, Any]) -> list[str]:
    from kuberoll_operator.quantities import number_of

    found = []
    if "memory" in limits:
        memory = int(number_of(limits["memory"]))
        found += [f"--memory={memory}b", f"--memory-swap={memory}b"]
    if "cpu" in limits:
        # More than there are is no limit.
        found.append(f"--cpus={min(float(number_of(limits['cpu'])), float(os.cpu_count() or 1))}")
    return found
