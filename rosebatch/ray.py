"""The public name of ``rosebatch.llm.ray_data``."""

from rosebatch.llm.ray_data import Generator as Generator

__all__ = ["Generator"]
