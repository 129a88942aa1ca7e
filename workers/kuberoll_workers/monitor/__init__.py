"""Prometheus beside a run: its alerts, its configuration, its process."""
