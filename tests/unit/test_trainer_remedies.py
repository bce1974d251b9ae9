"""Errors of libraries in a trainer rank that a setting avoids."""

from __future__ import annotations

from moerl.trainer.main import cause_with_remedy

# Of Transformer Engine 2.20, dot_product_attention.py
NO_BACKEND = (
    "No dot product attention backend is available for the provided inputs. Please run with "
    "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends."
)


def test_attention_without_a_kernel_names_the_local_layers() -> None:
    """Once, however often it is told.  Control: another error has no remedy."""
    error = ValueError(NO_BACKEND)
    for _ in range(2):
        said = cause_with_remedy(error)
    assert said.startswith(f"ValueError: {NO_BACKEND}; cuDNN has no kernel")
    assert said.endswith("use trainer.transformer_impl=local")
    assert said.count("transformer_impl") == 1
    assert cause_with_remedy(ValueError("another")) == "ValueError: another"
