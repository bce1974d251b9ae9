"""Rollout engines: host/ runs beside SGLang's server, plugin/ inside it; both share these files."""
