"""The `math` environment: answers that are read, compared and scored."""
