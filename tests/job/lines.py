"""Access to result lines: a single completion is on the line itself, several are under ``choices``."""


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def texts(row):
    """The texts of all completions of a line."""
    return [choice["text"] for choice in row["choices"]] if "choices" in row else [row["text"]]


def codes(rows):
    return [row["error"]["code"] if row.get("error") else None for row in rows]


def choices_of(line):
    return line["response"]["body"]["choices"]
