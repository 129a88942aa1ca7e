"""Sandboxes in Linux namespaces, for machines without Docker; no privileges are needed."""
