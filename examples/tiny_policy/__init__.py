"""How the tiny policy of the examples is made; run `examples/train_tiny_policy.py`."""
