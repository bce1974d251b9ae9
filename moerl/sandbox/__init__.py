"""Isolated processes for rewards, environments and tools: limits, system calls, sandboxes."""
