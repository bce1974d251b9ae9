"""Forecasts what a run would start, transfer and need, without starting it."""
