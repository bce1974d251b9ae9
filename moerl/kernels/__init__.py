"""Optional compiled kernels: sources in csrc/, built by `moerl.kernels.build`, loaded by `library`.

Each has a Python reference, so everything works without them.
"""
