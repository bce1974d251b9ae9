"""Checkpoints: content, asynchronous writer, which ones are kept; conversion from and to models."""
