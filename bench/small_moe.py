"""The Qwen3-MoE that benches of one trainer rank measure: 4 layers of 16 experts."""

from moerl.layout import ModelSpec

SPEC = ModelSpec(
    family="qwen3_moe",
    vocab_size=32000,
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=32,
    experts=16,
    experts_per_token=4,
    moe_ffn=128,
    moe_layers=(0, 1, 2, 3),
    tied=False,
    norm_topk_prob=True,
    rms_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    dtype="float32",
)
