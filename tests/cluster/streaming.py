"""Commands in the containers of the test kubelet, as `kubectl exec` has them run: the kubelet's own HTTPS server.

The API server hands a WebSocket of `v4.channel.k8s.io` on as it is. Where pods are containers, so does this server, to
the runtime's own. Beside a process, a command gets the environment and the directory of its container's first process,
and the paths that this one was given in the place of its spec's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import psutil
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

from tests.cluster.api import Api
from tests.cluster.control_plane import ApiServer
from tests.cluster.kubelet import NODE, Kubelet
from tests.cluster.processes import marked

_PROTOCOL = "v4.channel.k8s.io"
_STDOUT = 1
_CHUNK = 1 << 16


class ExecServer:
    """The server, in a thread of its own; the node's status says where it is.

    Attributes:
        started: How many commands were started.
        cut_after: Bytes of standard output after which connections are cut, one entry each; then no more are.
    """

    def __init__(self, server: ApiServer, kubelet: Kubelet) -> None:
        self._server, self._kubelet = server, kubelet
        self.started = 0
        self.cut_after: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._stop: Future[None] = Future()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="exec-server")
        self._thread.start()
        self._ready.result(60)

    def stop(self) -> None:
        """Cuts all connections and ends."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        async with Api(self._server.url, self._server.token, self._server.authority) as self._api:
            node = await self._api.get("Node", None, NODE)
            address = next(item["address"] for item in node["status"]["addresses"] if item["type"] == "InternalIP")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._server.certificates.certificate, self._server.certificates.key)
            await web.TCPSite(runner, address, 0, ssl_context=context).start()
            port = runner.addresses[0][1]
            status = {"daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}
            await self._api.patch("Node", None, NODE, {"status": status}, subresource="status")
            self._ready.set_result(None)
            try:
                await asyncio.wrap_future(self._stop)
            finally:
                await runner.cleanup()

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(_PROTOCOL,), max_msg_size=0)
        await socket.prepare(request)
        self.started += 1
        cut = self.cut_after.pop(0) if self.cut_after else None
        run = self._in_container if self._kubelet.in_containers else self._beside_process
        await run(request, socket, cut)
        return socket

    async def _in_container(self, request: web.Request, socket: web.WebSocketResponse, cut: int | None) -> None:
        namespace, pod, container = (request.match_info[part] for part in ("namespace", "pod", "container"))
        command = request.query.getall("command")
        url = await asyncio.to_thread(self._kubelet.exec_url, namespace, pod, container, command)
        async with ClientSession() as session, session.ws_connect(url, protocols=(_PROTOCOL,), max_msg_size=0) as inner:
            ways = {asyncio.create_task(_relay(inner, socket, cut)), asyncio.create_task(_relay(socket, inner, None))}
            # Who has gone away reads nothing any more.
            _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await socket.close()

    async def _beside_process(self, request: web.Request, socket: web.WebSocketResponse, cut: int | None) -> None:
        pod = await self._api.get("Pod", request.match_info["namespace"], request.match_info["pod"])
        spec = next(item for item in pod["spec"]["containers"] if item["name"] == request.match_info["container"])
        marker = f"{pod['metadata']['uid']}/{spec['name']}"
        first = await asyncio.to_thread(_first, marker)
        given = dict(zip(spec["command"], first.cmdline(), strict=False))
        command = [given.get(word, word) for word in request.query.getall("command")]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command[1:],
            env=first.environ(),
            cwd=first.cwd(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await self._connect(socket, process, cut)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def _connect(
        self, socket: web.WebSocketResponse, process: asyncio.subprocess.Process, cut: int | None
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        whole = asyncio.create_task(_pump(process.stdout, socket, _STDOUT, cut))
        errors = asyncio.create_task(_pump(process.stderr, socket, 2, None))
        typed = asyncio.create_task(_type(socket, process.stdin))
        # Who has gone away reads nothing any more, and what is cut is not heard of.
        await asyncio.wait({whole, typed}, return_when=asyncio.FIRST_COMPLETED)
        if whole.done() and not whole.cancelled() and whole.result():
            await errors
            code = await process.wait()
            status = {"status": "Success"} if code == 0 else _failure(code)
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        for task in (whole, errors, typed):
            task.cancel()
        await asyncio.gather(whole, errors, typed, return_exceptions=True)
        await socket.close()


def _failure(code: int) -> dict[str, object]:
    causes = [{"reason": "ExitCode", "message": str(code)}]
    message = f"command terminated with non-zero exit code: exit status {code}"
    return {"status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": {"causes": causes}}


def _first(marker: str) -> psutil.Process:
    return min(marked(marker), key=lambda process: process.create_time())


async def _relay(
    source: web.WebSocketResponse | ClientWebSocketResponse,
    sink: web.WebSocketResponse | ClientWebSocketResponse,
    cut: int | None,
) -> None:
    """Hands messages on until the source closes, or so many bytes of standard output have passed."""
    with contextlib.suppress(ConnectionError):
        async for message in source:
            if message.type is not WSMsgType.BINARY:
                continue
            data = message.data
            if cut is not None and data[0] == _STDOUT:
                data, cut = data[: 1 + cut], cut + 1 - len(data)
            await sink.send_bytes(data)
            if cut is not None and cut <= 0:
                return


async def _pump(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int, cut: int | None) -> bool:
    """Whether the stream came to its end, and was not cut."""
    with contextlib.suppress(ConnectionError):
        while data := await stream.read(_CHUNK):
            await socket.send_bytes(bytes([channel]) + data[:cut])
            if cut is not None:
                cut -= len(data)
                if cut <= 0:
                    return False
        return True
    return False


async def _type(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data[0] == 0:
            stdin.write(message.data[1:])
            with contextlib.suppress(ConnectionError):
                await stdin.drain()
    stdin.close()


@contextlib.contextmanager
def running_exec_server(server: ApiServer, kubelet: Kubelet) -> Iterator[ExecServer]:
    """The server of the one node that there is."""
    found = ExecServer(server, kubelet)
    try:
        yield found
    finally:
        found.stop()
