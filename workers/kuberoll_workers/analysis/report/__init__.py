"""Report of a run: numbers of all trajectories, and their texts, in one HTML page."""
