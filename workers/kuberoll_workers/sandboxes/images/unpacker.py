"""A process that unpacks layers and removes them, with no rights but over the ids of machines.

python -m kuberoll_workers.sandboxes.images.unpacker SOCKET

It enters a user namespace of its own and becomes its root. So the owners of files are right, an ordinary user can have
files of its subordinate ids, and whatever an archive makes of it, it can do nothing as the user who started it: what
it gets are descriptors. Messages are JSON, one a packet; it ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kuberoll_workers.sandboxes.images import errors
from kuberoll_workers.sandboxes.images.compression import Reader
from kuberoll_workers.sandboxes.images.errors import ImageError, ImageUnavailable
from kuberoll_workers.sandboxes.images.layers import Ids, Limits, Unpacked, empty, unpack
from kuberoll_workers.sandboxes.images.sources import StoredLayer
from kuberoll_workers.sandboxes.images.tree import DIRECTORY
from kuberoll_workers.sandboxes.users import IdMap, IdRange, unavailable, write_maps

_NEW_USER: Final = 0x10000000
_SET_PDEATHSIG: Final = 1
_PACKET: Final = 64 << 10
_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE")
_START_SECONDS, _END_SECONDS = 60.0, 10.0


class Unpacker:
    """The process, from its side that trusts it; started when it is needed first, and used by one thread."""

    def __init__(self, ids: IdMap, directory: Path, limits: Limits) -> None:
        """
        Args:
            directory: Where layers are, each in a directory.
        """
        self._ids = ids
        self._directory = directory
        self._limits = limits
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=error is not None)

    def unpack(self, layer: StoredLayer, diff_id: str, name: str, *, lowers: Sequence[str], lock: int) -> Unpacked:
        """Unpack a layer into an empty directory that the machine's root has.

        Args:
            name: The directory.
            lowers: Directories of the layers below, lowest first.
            lock: Descriptor of a lock's file, which the process has until it is done, even if this one dies.

        Raises:
            ImageError: See `layers.unpack`; DigestMismatch: it is another layer.
        """
        request = {
            "do": "unpack",
            "name": name,
            "lowers": list(lowers),
            "offset": layer.offset,
            "length": layer.length,
            "digest": layer.digest,
            "diff_id": diff_id,
            "limits": dataclasses.asdict(self._limits),
        }
        return Unpacked(**self._ask(request, [layer.descriptor, lock]))

    def empty(self, name: str) -> None:
        """Remove everything in a directory, whoever's it is."""
        self._ask({"do": "empty", "name": name}, [])

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        channel = self._socket or self._start()
        directory = os.open(self._directory, DIRECTORY)
        try:
            socket.send_fds(channel, [json.dumps(request).encode()], [directory, *descriptors])
        except OSError as error:
            raise self._died() from error
        finally:
            os.close(directory)
        return self._answer(channel)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Not what else is in the environment, such as tokens.
                env={name: text for name, text in os.environ.items() if name in _VARIABLES},
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(_START_SECONDS)
        self._answer(ours)
        write_maps(self._process.pid, self._ids)
        ours.send(json.dumps({"users": _insides(self._ids.users), "groups": _insides(self._ids.groups)}).encode())
        self._answer(ours)
        ours.settimeout(None)
        return ours

    def _answer(self, channel: socket.socket) -> dict[str, Any]:
        try:
            data = channel.recv(_PACKET)
        except TimeoutError as error:
            raise ImageUnavailable(f"the process that unpacks layers did not start in {_START_SECONDS:g} s") from error
        except ConnectionError:
            data = b""
        if not data:
            raise self._died()
        answer: dict[str, Any] = json.loads(data)
        if "errno" in answer:
            raise unavailable(OSError(answer["errno"], os.strerror(answer["errno"]), "unshare"))
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["text"])
        return answer

    def _died(self) -> ImageError:
        assert self._process is not None
        code = self._process.wait()
        self._end(at_once=True)
        if code == -signal.SIGVTALRM:
            return errors.ImageInvalid("a header of the layer takes forever to read")
        return ImageUnavailable(f"the process that unpacks layers ended with {code}: perhaps for want of memory")

    def _end(self, *, at_once: bool) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if at_once else _END_SECONDS)
            self._process.kill()
            self._process.wait()
            self._process = None


def _insides(ranges: Iterable[IdRange]) -> list[tuple[int, int]]:
    return [(item.inside, item.count) for item in ranges]


def main(channel: socket.socket) -> None:
    """Serve the other side until it closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER) < 0:
        channel.send(json.dumps({"errno": ctypes.get_errno()}).encode())
        return
    channel.send(b"{}")
    if not (mapped := channel.recv(_PACKET)):
        return
    ids = _become_root(json.loads(mapped))
    # After the change of users, which takes it back. Whoever started this may be gone already: then the socket is.
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    channel.send(b"{}")
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _PACKET, 8)
        if not data:
            return
        try:
            answer = _serve(json.loads(data), descriptors, ids, libc)
        except ImageError as error:
            answer = {"error": type(error).__name__, "text": str(error)[:4000]}
        except OSError as error:
            answer = {"error": ImageUnavailable.__name__, "text": str(error)[:4000]}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def _become_root(mapped: dict[str, list[list[int]]]) -> Ids:
    with contextlib.suppress(PermissionError):
        # Not to be had with a single group, and then there is none to lose.
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    users, groups = (tuple((first, count) for first, count in mapped[kind]) for kind in ("users", "groups"))
    return Ids(users, groups)


def _serve(request: dict[str, Any], descriptors: list[int], ids: Ids, libc: ctypes.CDLL) -> dict[str, Any]:
    with contextlib.ExitStack() as opened:

        def directory(name: str) -> int:
            found = os.open(name, DIRECTORY, dir_fd=descriptors[0])
            opened.callback(os.close, found)
            return found

        target = directory(request["name"])
        if request["do"] == "empty":
            empty(target)
            return {}
        lowers = [directory(name) for name in request["lowers"]]
        pull = _Part(descriptors[1], request["offset"], request["length"]).pull
        reader = Reader(pull, diff_id=request["diff_id"], digest=request["digest"])
        opened.callback(reader.close)
        made = unpack(reader, target, ids=ids, lowers=lowers, limits=Limits(**request["limits"]))
        reader.check()
        # What is renamed into its place must be whole after a power cut, too.
        if libc.syncfs(target) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return dataclasses.asdict(made)


class _Part:
    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._read = functools.partial(os.pread, descriptor)
        self._at = offset
        self._end = offset + length

    def pull(self, count: int) -> bytes:
        data = self._read(min(count, self._end - self._at), self._at)
        self._at += len(data)
        return data


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
