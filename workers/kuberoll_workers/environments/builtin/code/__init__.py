"""Environments of which the answer is a program."""
