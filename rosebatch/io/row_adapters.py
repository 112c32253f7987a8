"""Which of a run's adapters a row is answered with."""

from dataclasses import dataclass

from msgspec.structs import replace

from rosebatch.core.errors import RowError, printable
from rosebatch.io.rows import FailedRow, Row


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of a run: all rows get the only one; of several, each row gets the one that it names, or none.

    Attributes:
        names: of the adapters.
        models: names of the model itself, as requests of an OpenAI batch have it.
    """

    names: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def chosen(self, row: Row) -> Row | FailedRow:
        """The row, whose ``lora`` is the adapter that it is computed with, if it is not merged into the model.

        A row that names what there is not has failed. The ``model`` of a request counts where there are several.
        """
        by_row, asked = len(self.names) > 1, row.lora
        if asked is None:
            # Nearly all rows have no model either.
            if row.model is None or not by_row or row.model in self.models:
                return row
            if row.model not in self.names:
                known = f"neither the model, {self.models[0]}, nor an adapter: {', '.join(self.names)}"
                hint = "--served-model-name gives the model another name"
                return row.failed(RowError("invalid_field", f"model {_quoted(row.model)} is {known}; {hint}"))
            asked = row.model
        if asked not in self.names:
            there = f"--lora names {', '.join(self.names)}" if self.names else "give --lora NAME=FOLDER"
            return row.failed(RowError("invalid_field", f"lora {_quoted(asked)} is no adapter of this run: {there}"))
        return replace(row, lora=asked if by_row else None)


NO_ADAPTERS = RowAdapters()


def _quoted(name: str) -> str:
    return repr(printable(name[:100]))
