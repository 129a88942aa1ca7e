"""Sandboxes that are pods of a real cluster, which `KUBEROLL_TEST_KUBECONFIG` names."""
