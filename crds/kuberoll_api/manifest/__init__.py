"""Manifests: YAML files read, changed by `--set`, and mistakes in them explained."""
