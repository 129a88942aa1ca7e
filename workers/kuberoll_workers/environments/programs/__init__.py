"""Sandbox for programs that a model wrote: no network, no files but a scratch directory, limits of everything.

`ProgramRunner` runs one program and returns plain data; docs/explanation/sandbox.md explains its layers.
"""

from kuberoll_workers.environments.programs.model import Limits, Outcome, Program, ProgramFailed, SandboxUnavailable
from kuberoll_workers.environments.programs.runner import ProgramRunner

__all__ = ["Limits", "Outcome", "Program", "ProgramFailed", "ProgramRunner", "SandboxUnavailable"]
