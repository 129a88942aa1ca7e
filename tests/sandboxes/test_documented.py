"""The handle's methods are those of docs/reference/sandboxes.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kuberoll_workers.sandboxes.handle import Sandbox

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sandboxes.md"


def test_the_page_has_the_handle_s_methods_and_their_parameters() -> None:
    section = PAGE.read_text().split("## The handle")[1].split("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    methods = {name: inspect.signature(method) for name, method in inspect.getmembers(Sandbox, inspect.isfunction)}
    shown = re.findall(r"`(\w+)\(([^)]*)\)`", cells)
    # Whoever leased it closes it.
    assert {name for name, _ in shown} == {name for name in methods if name[0] != "_"} - {"close"}
    for name, arguments in shown:
        given = [word for word in arguments.split(", ") if word not in ("", "*", "…")]
        known = [parameter for parameter in methods[name].parameters if parameter != "self"]
        assert given == (known[: len(given)] if "…" in arguments else known), name
