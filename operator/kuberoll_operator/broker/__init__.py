"""The broker: makes, watches and removes the pods of trajectories' sandboxes for the workers, which have no access."""
