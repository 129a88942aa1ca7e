"""Harbor's task folders (format 1.4), read unmodified: configuration, rows, rewards, images."""
