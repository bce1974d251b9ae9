"""Stateful environments: their workers, and environments that come with moerl."""
