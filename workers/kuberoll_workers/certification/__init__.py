"""Certification of rows: right and wrong answers are graded, again and again, before any engine runs."""
