"""What stands in lines of results: several completions under ``choices``, one on the line itself."""


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def texts(row):
    """Of all its completions."""
    return [choice["text"] for choice in row["choices"]] if "choices" in row else [row["text"]]


def codes(rows):
    return [row["error"]["code"] if row.get("error") else None for row in rows]


def choices_of(line):
    return line["response"]["body"]["choices"]
