"""Megatron-core trainer: train loop, learner, checkpoints, HF conversion, reference models."""
