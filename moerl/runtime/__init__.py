"""The run directory, trace, stack dumps, private folders, and the process tree of a run."""
