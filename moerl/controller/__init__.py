"""Controller, produce and score loops, buffer, staleness."""
