"""Access to result lines: a single completion is on the line itself, several are under ``choices``."""


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def texts(row):
    """The texts of all completions of a line."""
    return [choice["text"] for choice in row["choices"]] if "choices" in row else [row["text"]]


def codes(rows):
    """The error code of each result row, or line of a batch; None for those that were served."""
    errors = [row["response"]["body"].get("error") if "response" in row else row.get("error") for row in rows]
    return [error["code"] if error else None for error in errors]


def choices_of(line):
    return line["response"]["body"]["choices"]
