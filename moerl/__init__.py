"""moerl: asynchronous RL post-training of Mixture-of-Experts models with exact replay."""

__version__ = "0.1.0"
