"""Comparison of two runs: settings that differ, metrics with their differences, and tasks that changed."""
