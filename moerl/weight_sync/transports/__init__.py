"""Byte movers between trainer ranks and engine ranks, behind one seam
(`moerl.weight_sync.transports.base`).
"""
