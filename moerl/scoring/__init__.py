"""Rewards in worker processes: outside the event loop, with a timeout."""

from moerl.scoring.process import ProcessScorer
from moerl.scoring.task_scorers import TaskScorers

__all__ = ["ProcessScorer", "TaskScorers"]
