"""Environments: interface, registry, isolation, and the built-in ones."""

from kuberoll_workers.environments.interface import EnvironmentInterface, EnvironmentReturn, UnusableRow
from kuberoll_workers.environments.registry import BUILT_INS, UnusableEnvironment, create, resolve

__all__ = [
    "BUILT_INS",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "UnusableEnvironment",
    "UnusableRow",
    "create",
    "resolve",
]
