"""Timing the engine on workloads of token ids, and other engines on the same workloads."""
