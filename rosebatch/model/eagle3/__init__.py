"""Heads of EAGLE-3: a decoder layer that guesses what a model says next, from the states between the model's layers.

Source: arXiv 2503.01840. Names of tensors and fields are those of its published heads, and of SGLang and vLLM.
"""
