"""Namespaces for tests: something is done as root of a user namespace, with mounts of its own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

from kuberoll_workers.sandboxes.users import IdMap, unavailable, write_maps

_NEW_NAMESPACES = 0x10000000 | 0x00020000
_PRIVATE = (1 << 14) | (1 << 18)


def inside(ids: IdMap, work: Callable[[], Any]) -> Any:
    """Do something as root of a user namespace with the ids, with mounts of its own, in a process of its own."""
    entered, mapped = os.pipe(), os.pipe()
    result = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(mapped[1])
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_NEW_NAMESPACES) < 0:
                raise unavailable(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
            os.write(entered[1], b"1")
            os.read(mapped[0], 1)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            mount("none", "/", _PRIVATE)
            answer = {"value": work()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(result[1], "w") as file:
            json.dump(answer, file)
        os._exit(0)
    for descriptor in (entered[1], mapped[0], result[1]):
        os.close(descriptor)
    if os.read(entered[0], 1):
        write_maps(child, ids)
    os.close(mapped[1])
    with os.fdopen(result[0]) as file:
        answer = json.load(file)
    os.close(entered[0])
    os.waitpid(child, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def mount(source: str, target: str, flags: int, kind: str | None = None, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {options}", target)


def run_in(root: str, argv: list[str], uid: int) -> str:
    """What a program prints that runs in a directory as its root, as one of the machine's users."""
    mount("/proc", f"{root}/proc", 1 << 12 | 1 << 14)

    def enter() -> None:
        os.chroot(root)
        os.chdir("/")
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    return subprocess.run(argv, capture_output=True, text=True, check=True, preexec_fn=enter).stdout
