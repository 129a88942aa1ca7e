"""Adapters between a run and the trainers that people have; each module needs its trainer's packages."""
