"""Why a job waits, in Kubernetes' own words and what to do: from the statuses and events of everything it needs."""
