"""Schemas made from the model: the CRD with its rules, and the reference page."""
