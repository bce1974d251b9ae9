"""Torch code in place of SGLang's kernels, so that tests serve every family on a plain CPU."""
