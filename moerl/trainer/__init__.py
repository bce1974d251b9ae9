"""Megatron-core: the ranks of a trainer, trained, scoring, supervised or scoring."""
