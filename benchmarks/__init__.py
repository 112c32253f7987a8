"""Benchmarks of single parts, and experiments, for developers; not in the wheel."""
