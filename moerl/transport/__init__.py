"""Byte movers between trainer ranks and engine ranks, behind one seam (`moerl.transport.base`)."""
