"""Subcommands of `kuberoll` from the operator's package."""
