"""Mixtral: Llama's layers with experts that have other names."""

from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.llama import Llama


class Mixtral(Llama):
    """See ``Llama``."""

    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
