"""The shape of latent attention."""

import msgspec

from rosebatch.config.limits import MAX_SIZE, require_in


class LatentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Attention whose keys and values are products with one latent of each token (MLA, arXiv 2405.04434).

    The formula is in ``rosebatch_kernels.latent_attention.reference``. ``ModelConfig.head_dim`` is that of q: channels
    that are not rotated, then ``rotary_dim`` that are. The one K/V head of a layer is the latent.

    Attributes:
        rank: numbers of a token's latent.
        value_dim: of a head's values.
        q_rank: numbers that q is made of, with a norm before; 0 where q is one product.
        interleaved: whether a checkpoint rotates channel ``2i`` with ``2i + 1``, or with half of them between.
    """

    rank: int
    value_dim: int
    q_rank: int = 0
    interleaved: bool = True

    def __post_init__(self) -> None:
        require_in("rank", self.rank, 1, MAX_SIZE)
        require_in("value_dim", self.value_dim, 1, MAX_SIZE)
        require_in("q_rank", self.q_rank, 0, MAX_SIZE)
