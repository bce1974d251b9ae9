"""Rollout engines: one SGLang server per host, its client, and the check of its records."""
