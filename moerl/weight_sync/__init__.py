"""Weight sync: from a weight snapshot on each trainer rank to a publish session on each engine."""
