"""Our side of an engine: starts one SGLang server, is its client, checks its records."""
