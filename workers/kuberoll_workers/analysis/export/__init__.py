"""Export of trajectories to trainers' formats."""
