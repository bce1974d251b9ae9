"""Agents: programs that talk to the policy over HTTP, recorded token by token."""
