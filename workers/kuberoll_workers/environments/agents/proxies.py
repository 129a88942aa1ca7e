"""Clients of the policy in a process that has an HTTP proxy: they go to it directly."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit


def without_proxy(variables: Mapping[str, str], url: str) -> dict[str, str]:
    """Variables by which HTTP clients use no proxy for a URL, and for what these variables already name."""
    known = variables.get("NO_PROXY") or variables.get("no_proxy") or ""
    names = [name.strip() for name in known.split(",")]
    host = urlsplit(url).hostname
    hosts = ",".join(filter(None, dict.fromkeys([*names, host or ""])))
    return {"NO_PROXY": hosts, "no_proxy": hosts}
