"""Connections to what runs elsewhere."""
