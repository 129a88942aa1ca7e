"""Subcommands of `kuberoll` from the workers' package."""
