"""Published weights: the files of a version, and the changes from one version to the next."""
