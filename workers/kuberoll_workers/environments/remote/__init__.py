"""Environments on servers of their own: the HTTP protocol, its server, and the worker's side of it."""
