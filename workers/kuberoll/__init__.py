"""What other programs import from this distribution."""
