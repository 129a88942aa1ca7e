"""Faces of other systems over this one."""
