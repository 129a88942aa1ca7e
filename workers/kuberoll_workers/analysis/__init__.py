"""A run's numbers: aggregates, report, exports, other rewards and experiment trackers."""
