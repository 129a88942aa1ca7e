"""The subcommands that the workers bring to the `kuberoll` command."""
