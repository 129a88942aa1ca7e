"""The policy: the generation interface, the Serve app around an engine, and the client of it."""
