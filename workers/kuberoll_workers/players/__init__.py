"""Ways of playing a trajectory beside the loop's own."""
