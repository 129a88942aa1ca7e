"""Machines that trajectories have, each its own."""
