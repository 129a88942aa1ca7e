"""The engines behind the Serve app."""
