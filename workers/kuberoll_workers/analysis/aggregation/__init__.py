"""Aggregates of a run, for each environment and as a whole. Formulas: docs/reference/aggregates.md."""
