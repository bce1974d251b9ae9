"""Dry run and forecasts of a run: processes, transfers and memory, without starting it."""
