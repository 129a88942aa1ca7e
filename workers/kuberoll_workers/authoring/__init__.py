"""Writing environments: a contract that they must pass, a terminal to play them in, and files to begin with."""

from kuberoll_workers.authoring.contract import CHECKS, ContractBroken, Result, check_environment

__all__ = ["CHECKS", "ContractBroken", "Result", "check_environment"]
