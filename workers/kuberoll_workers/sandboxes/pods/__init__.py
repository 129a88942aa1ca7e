"""Sandboxes that are pods: a broker makes them, as workers have no access to Kubernetes."""
