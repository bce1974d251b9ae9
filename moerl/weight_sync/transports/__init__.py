"""Transports of weight bytes between trainer and engine ranks, behind one interface (`base`)."""
