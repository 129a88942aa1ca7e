"""Environments: interface, registry, isolation, and the built-in ones."""

from kuberoll_workers.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    ScoringCase,
    UnusableRow,
)
from kuberoll_workers.environments.registry import BUILT_INS, LIBRARIES, UnusableEnvironment, create, resolve
from kuberoll_workers.environments.served_models import ServedModel, policy_endpoint, service_endpoint
from kuberoll_workers.environments.tools import ToolEnvironment, ToolError, tool

__all__ = [
    "BUILT_INS",
    "LIBRARIES",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Episode",
    "EpisodeEnd",
    "EpisodeStart",
    "GroupMember",
    "GroupScore",
    "ScoringCase",
    "ServedModel",
    "ToolEnvironment",
    "ToolError",
    "UnusableEnvironment",
    "UnusableRow",
    "create",
    "policy_endpoint",
    "resolve",
    "service_endpoint",
    "tool",
]
