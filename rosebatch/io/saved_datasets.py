"""Folders that ``datasets`` saved to disk: Arrow files, and the order that they are in."""

from collections.abc import Callable, Collection

import msgspec

from rosebatch.core.errors import UserError

# Files of JSON that describe a data set, and hold no rows of it; STATE only beside others of them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
STATE = "state.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    data_files: list[_File] = msgspec.field(name="_data_files")
    indices: list[_File] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def saved_files(folder: str, names: Collection[str], read: Callable[[str], bytes]) -> list[str] | None:
    """The names of the files of a data set, in the order of its rows; None if the folder is no data set.

    Args:
        folder: for messages.
        names: of its files.
        read: gives the contents of one.

    Raises:
        UserError: the folder has several splits, or does not hold the rows of its data set alone.
    """
    try:
        if "dataset_dict.json" in names:
            splits = msgspec.json.decode(read("dataset_dict.json"), type=_Splits).splits
            raise UserError(
                f"{folder}: has the splits {', '.join(splits)}; name one of them, such as {folder}/{splits[0]}"
            )
        if not {STATE, "dataset_info.json"}.issubset(names):
            return None
        state = msgspec.json.decode(read(STATE), type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise UserError(f"{folder}: its state.json or dataset_dict.json is damaged ({error})") from None
    if state.indices:
        raise UserError(f"{folder}: its rows are a selection of its files; save it again after flatten_indices()")
    return [each.filename for each in state.data_files]
