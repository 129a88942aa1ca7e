"""The RolloutJob as pydantic models, one module for each part of its spec."""
