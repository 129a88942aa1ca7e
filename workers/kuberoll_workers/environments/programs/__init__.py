"""Confinement of programs that a model wrote: no network, no files but a scratch directory, limits of everything.

`ProgramRunner` runs one program and returns plain data; docs/explanation/programs.md explains its layers.
"""

from kuberoll_workers.environments.programs.model import ConfinementUnavailable, Limits, Outcome, Program, ProgramFailed
from kuberoll_workers.environments.programs.runner import ProgramRunner

__all__ = ["ConfinementUnavailable", "Limits", "Outcome", "Program", "ProgramFailed", "ProgramRunner"]
