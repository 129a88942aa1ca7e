"""Everything that runs in an environment worker pod or on a laptop: policy, environments, loop, collection."""
