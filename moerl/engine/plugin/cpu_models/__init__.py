"""Torch code in place of modules of SGLang that have no path for a plain CPU, by model family.

Each is registered for its values of `model_type` only: the table is
`moerl.engine.plugin.cpu_kernels`.
"""
