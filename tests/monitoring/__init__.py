"""What is measured, as Prometheus sees it: every query of every dashboard and alert, on what a run really exports."""
