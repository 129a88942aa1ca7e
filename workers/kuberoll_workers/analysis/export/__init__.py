"""Trajectories as trainers read them."""
