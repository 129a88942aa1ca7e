"""`kuberoll run`: the same Serve app and the same worker as in a cluster, as processes of this machine."""
