"""Ray's head on one machine without the processes for clusters and dashboards.

Ray has no settings for it. Without its dashboard it still starts the dashboard's process, with one module that reports
usage statistics, and waits for it; and always a monitor, which adds machines to clusters. All private parts of Ray that
KubeRoll replaces are in this module, which is tested with a real Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def alone() -> Iterator[None]:
    """Have a Ray that is started while the context lasts start neither a dashboard nor a monitor."""
    from ray._private.node import Node

    node: Any = Node
    monitor, dashboard = node.start_monitor, node.start_api_server
    node.start_monitor, node.start_api_server = _no_monitor, _no_dashboard
    try:
        yield
    finally:
        node.start_monitor, node.start_api_server = monitor, dashboard


def _no_monitor(node: Any) -> None:
    """Replace `Node.start_monitor`."""


def _no_dashboard(node: Any, **_: Any) -> None:
    """Replace `Node.start_api_server`."""
    # As Ray itself sets it for a dashboard without a page.
    node._webui_url = ""
