"""Images in prompts, as an engine gets them: nothing of files or rows."""

from typing import Any

import msgspec


class PromptImage(msgspec.Struct, frozen=True, eq=False):
    """An image in a prompt, prepared for a model.

    Attributes:
        offset: place of its first token in the prompt.
        num_tokens: successive placeholders from there on; each gets a vector.
        grid: rows and columns of these tokens.
        digest: 32 bytes, equal only for equal pixels in an equal grid.
        patches: numpy uint8, what the model's tower reads; see ``rosebatch.model.vision.vision.Patches``.
    """

    offset: int
    num_tokens: int
    grid: tuple[int, int]
    digest: bytes
    patches: Any

    @property
    def end(self) -> int:
        """Place after its last token."""
        return self.offset + self.num_tokens
