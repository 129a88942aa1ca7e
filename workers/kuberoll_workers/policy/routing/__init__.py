"""Which replica answers a turn: the one that has its prefix in its cache, as long as that one can."""
