"""Access to Kubernetes: a thin client, server-side apply, events, the lease."""
