"""Datasets: sources, rows, prompt groups and the samples of a shard."""
