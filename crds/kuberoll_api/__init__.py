"""The RolloutJob API: one pydantic model defines the CRD's schema, the validation and the defaults."""
