"""Checkpoints for resume: content, asynchronous writer, and which ones are kept."""
