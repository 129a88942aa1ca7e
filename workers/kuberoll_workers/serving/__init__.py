"""The generation side, under Ray Serve: the application, its engines and its OpenAI routes."""
