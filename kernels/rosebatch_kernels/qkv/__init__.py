"""The step between the fused QKV projection and attention: QK norm, rotary positions, the KV append."""
