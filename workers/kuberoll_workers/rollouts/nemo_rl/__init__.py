"""NeMo RL's rollout functions as thin faces over the rollout loop: same names, arguments and return shapes."""
