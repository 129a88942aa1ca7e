"""Tests of the broker of sandboxes' pods."""
