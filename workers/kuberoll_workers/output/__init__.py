"""A run's output: records, journals, storage and the state that a resumed run reads."""
