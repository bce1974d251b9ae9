"""What lives on each node of a run: guarded processes, Ray, engine and trainer nodes, requests."""
