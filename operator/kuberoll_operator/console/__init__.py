"""What the commands for people do in a cluster: `kuberoll get`, `kuberoll logs`, `kuberoll top`."""
