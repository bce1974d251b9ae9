"""Types, messages and their wire forms: no torch, Ray, Megatron or SGLang."""
