"""The heart: generate, step the environments, reward, repeat."""
