"""Megatron-core: the ranks of a gang, trained, frozen, supervised or scoring."""
