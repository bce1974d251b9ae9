"""Scorers: functions in isolated processes, services, and the answers of all of them."""

from moerl.scoring.process import ProcessScorer
from moerl.scoring.scorers import RunScorers, make_scorers

__all__ = ["ProcessScorer", "RunScorers", "make_scorers"]
