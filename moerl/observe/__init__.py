"""Output of a run for its user: metrics, live console and report page."""
