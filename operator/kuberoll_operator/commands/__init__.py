"""The subcommands that the operator brings to the `kuberoll` command."""
