"""Starts a run: Ray actors, torchrun, supervision.  The only package that imports ray."""
