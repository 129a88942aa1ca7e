"""Headers of requests to a replica, and of its answers."""

from __future__ import annotations

SESSION_HEADER = "x-session-id"
"""Requests with the same value go to the same replica, where their prefix is cached."""

LOAD_HEADER = "x-kuberoll-load"
"""Response header: the number of other requests that the replica was working on."""

COMMIT_HEADER = "x-kuberoll-model-commit"
"""Response header: the commit of the replica's model at the hub, if it has one."""
