"""Cluster access of the user's commands: `kuberoll get`, `kuberoll logs`, `kuberoll top`."""
