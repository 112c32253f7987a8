"""Timing the engine: workloads of token ids, and other engines on the same ones."""
