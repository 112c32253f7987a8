"""Texts that an embedding model wants in front of what it embeds: its "prompts", such as an instruction for queries."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rosebatch.core.errors import RowError


@dataclass(frozen=True, slots=True)
class EmbeddingPrompts:
    """The prompts of a model.

    Attributes:
        by_name: the texts.
        default: the name of the one that is taken where none is named; None for none.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def named(self, name: str | None) -> str:
        """The text of a name; of None that of the default, or nothing.

        Raises:
            RowError: there is none.
        """
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.by_name:
            known = f"it has {', '.join(sorted(self.by_name))}" if self.by_name else "it has none"
            raise RowError("invalid_field", f"prompt_name: the model has no prompt {name!r}; {known}")
        return self.by_name[name]


NO_PROMPTS = EmbeddingPrompts()
