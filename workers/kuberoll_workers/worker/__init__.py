"""An environment worker: it runs some shards of a job against a policy endpoint."""
