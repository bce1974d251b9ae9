"""Rollout engines: host/ runs outside SGLang's server, plugin/ inside; both share these files."""
