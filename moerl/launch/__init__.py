"""Puts the plain classes on Ray, starts torchrun, supervises; the only home of ray."""
