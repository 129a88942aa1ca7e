"""The programs that pods run."""
