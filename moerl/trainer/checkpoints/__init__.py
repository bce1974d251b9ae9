"""Checkpoints for resume: what they hold, written while training goes on, and which are kept."""
