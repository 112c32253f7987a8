"""Further embeddings of tokens, for each layer."""

import msgspec

from rosebatch.config.limits import MAX_ID, MAX_SIZE, require_in


class LayerInputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Inputs of each layer, made of a token's id and of its embedding (Gemma 4 E2B, E4B).

    Attributes:
        size: numbers of a token for a layer.
        vocab_size: rows of their table.
        image_id: the id that stands for those of an image.
    """

    size: int
    vocab_size: int
    image_id: int = 0

    def __post_init__(self) -> None:
        require_in("size of layer_inputs", self.size, 1, MAX_SIZE)
        require_in("vocab_size of layer_inputs", self.vocab_size, 1, MAX_ID)
        require_in("image_id of layer_inputs", self.image_id, 0, self.vocab_size - 1)
