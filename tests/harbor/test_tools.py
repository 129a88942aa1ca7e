"""The tools of KubeRoll's own loop: whatever a policy calls, it reads an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_workers.harbor.tools import Tools
from kuberoll_workers.sandboxes.shell import Shell
from tests.sandboxes.conftest import Leasing, busybox, cache, lease, sandboxes  # noqa: F401 - fixtures

pytestmark = pytest.mark.processes

HALF = "\ud800"
"""Half of a pair of UTF-16, which JSON can write, and no text has."""


async def test_every_call_is_answered(lease: Leasing) -> None:  # noqa: F811
    calls: list[tuple[str, Any, str]] = [
        ("create", {"path": "new/file", "content": "one\ntwo\n"}, "new/file is written"),
        ("view", {"path": "new/file", "first": 2}, "     2\ttwo"),
        ("replace", {"path": "new/file", "old": "two", "new": "2"}, "new/file is changed"),
        ("replace", {"path": "new/file", "old": "two", "new": "2"}, "Error: the text is in new/file 0 times"),
        ("bash", {"command": "cd new; LEVEL=3; cat file; exit"}, "one\n2\n\n[the shell ended with exit code 0"),
        ("bash", {"command": "cat <<"}, "syntax error"),
        ("bash", {"command": "sleep 100"}, "took longer than 1 s"),
        ("bash", {"command": f"echo {HALF}"}, "Error: the arguments have characters that no text has"),
        ("bash", {"command": "echo after"}, "after\n"),
        ("create", {"path": "x", "content": HALF}, "Error: the arguments have characters"),
        ("create", {"path": HALF, "content": ""}, "Error: "),
        ("create", {"path": "a\0b", "content": ""}, "Error: "),
        ("view", {"path": "/"}, "Error: Is a directory"),
        ("view", {"path": "/bin/busybox"}, "Error: the file is no text"),
        ("view", {"path": 3}, "Error: path must be a text"),
        ("view", [], "Error: the arguments must be an object"),
        ("open", {}, "Error: there is no tool 'open'"),
        ("submit", {}, "submitted"),
    ]
    async with lease() as one:
        shell = Shell(one.sandbox)
        tools = Tools(one.sandbox, shell, user=None, seconds=1)
        for name, arguments, answer in calls:
            assert answer in await tools.call(name, json.dumps(arguments)), (name, arguments)
        assert "no JSON" in await tools.call("bash", "{")
        await shell.close()
        assert tools.submitted
