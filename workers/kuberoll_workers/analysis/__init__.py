"""A run's numbers: aggregates, report, exports, rescoring and experiment trackers."""
