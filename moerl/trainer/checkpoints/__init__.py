"""Checkpoints: content, asynchronous writer, rules of removal; conversion from and to models."""
