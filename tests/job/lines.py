"""Rows of batches, and access to result lines: one completion is on the line itself, several are under ``choices``."""

from rosebatch.io.openai.lines import parse_request


def requests(lines, **defaults):
    """The rows of a batch's lines."""
    for index, values in enumerate(lines):
        yield parse_request(values, index=index, where=f"line {index + 1}", defaults=defaults)


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
