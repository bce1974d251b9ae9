"""Megatron-core: model, process groups, replay, optimizer step, checkpoints, the gang itself."""
