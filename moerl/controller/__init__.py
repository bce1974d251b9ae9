"""The controller: produce and score loops, group buffer, staleness, journal."""
