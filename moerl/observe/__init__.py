"""What a person sees of a run: metrics, live console and report page."""
