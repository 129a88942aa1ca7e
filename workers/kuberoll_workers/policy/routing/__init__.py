"""Routing of requests to replicas: a turn goes to the replica that has its prefix cached, as long as that is usable."""
