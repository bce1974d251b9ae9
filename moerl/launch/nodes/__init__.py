"""Per-node processes: process tree, Ray, engine and trainer nodes, control API."""
