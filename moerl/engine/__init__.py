"""Rollout engines: one SGLang server per host, its client, and the record check at its door."""
