"""Checks of every node before a run: `moerl doctor`."""
