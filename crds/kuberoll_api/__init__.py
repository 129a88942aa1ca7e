"""The RolloutJob API: one pydantic model is the CRD's schema, the validation and the defaults."""
