"""The status of a job, from its facts."""
