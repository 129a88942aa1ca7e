"""Manifests: reading of YAML files, overrides by `--set`, and explanation of mistakes."""
