"""From a dataset to durable, resumable, aggregated trajectories."""
