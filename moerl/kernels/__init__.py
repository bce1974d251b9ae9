"""Optional compiled kernels: sources in csrc/, built by `moerl.kernels.build`, loaded by
`moerl.kernels.library`.  Everything works without them, through the Python reference of each.
"""
