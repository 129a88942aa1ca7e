"""Confinement of programs that a model wrote: no network, no files but a scratch directory, limits of everything.

`ProgramRunner` runs one program and returns plain data; docs/explanation/programs.md explains its layers.
"""

from kuberoll_workers.environments.programs.model import ConfinementUnavailable, Limits, Outcome, Program, ProgramFailed
from kuberoll_workers.environments.programs.runner import ProgramRunner

# Its name in 0.2.0, which environments of users may catch.
SandboxUnavailable = ConfinementUnavailable

__all__ = [
    "ConfinementUnavailable",
    "Limits",
    "Outcome",
    "Program",
    "ProgramFailed",
    "ProgramRunner",
    "SandboxUnavailable",
]
