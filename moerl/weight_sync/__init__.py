"""Publishing weights: from frozen buffers on the trainer to a session on each engine."""
