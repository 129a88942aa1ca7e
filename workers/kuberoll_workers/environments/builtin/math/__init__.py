"""The `math` environment: extraction, comparison and grading of answers."""
