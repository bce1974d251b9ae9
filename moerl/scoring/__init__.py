"""Rewards in worker processes: outside the event loop, with a timeout."""

from moerl.scoring.process import ProcessScorer, TaskScorers

__all__ = ["ProcessScorer", "TaskScorers"]
