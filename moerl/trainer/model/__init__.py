"""The Megatron model: platform, process groups, configuration, layers, replay of its routers."""
