"""Deterministic replay: virtual time, real scheduling, admission and routing, modelled engines."""
