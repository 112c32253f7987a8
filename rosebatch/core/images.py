"""Images in prompts, as an engine gets them: nothing of files or rows."""

from typing import Any

import msgspec


class PromptImage(msgspec.Struct, frozen=True, eq=False):
    """An image in a prompt, prepared for a model.

    Attributes:
        offset: place of its first token in the prompt.
        gets_vector: numpy bool ``[tokens]``, which of its tokens are placeholders; each of those gets a vector. Others,
            between rows or around the image, have embeddings of their own.
        grid: rows and columns of its vectors, or another shape; see ``rosebatch.model.vision.vision.Patches``.
        digest: 32 bytes, equal only for equal pixels in an equal grid.
        patches: numpy uint8, what the model's tower reads; see ``rosebatch.model.vision.vision.Patches``.
        whole_prompt: tokens of the prompt, if all of them see each other; 0 if at most those of the image do.
    """

    offset: int
    gets_vector: Any
    grid: tuple[int, int]
    digest: bytes
    patches: Any
    whole_prompt: int = 0

    @property
    def num_tokens(self) -> int:
        """From its first to its last."""
        return len(self.gets_vector)

    @property
    def num_pixels(self) -> int:
        """As the tower has it, with all tiles."""
        return int(self.patches.size) // 3

    @property
    def end(self) -> int:
        """Place after its last token."""
        return self.offset + self.num_tokens

    @property
    def seen_begin(self) -> int:
        """Where tokens see each other, the place of the first one: that of the image with a vector, or the prompt's."""
        return 0 if self.whole_prompt else self.offset + int(self.gets_vector.argmax())

    @property
    def seen_end(self) -> int:
        """The place after the last one."""
        return self.whole_prompt or self.end - int(self.gets_vector[::-1].argmax())
