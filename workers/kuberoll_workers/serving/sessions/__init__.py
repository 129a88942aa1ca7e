"""Sessions of agents: what was sampled in the calls of one episode, as trajectories."""
