"""What a line that is no JSON probably is, and what to write in its place."""

import re

TO_UTF8 = "; convert it, such as from Windows: iconv -f cp1252 -t utf-8"
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
_LONGEST = 1 << 16
_NAN = re.compile(rb"[:\[,]\s*-?(NaN|Infinity|nan|inf)\b")
_PYTHON = re.compile(rb"[:\[,]\s*(None|True|False)\b")
# An escape of half a pair: JavaScript writes it where it cuts an emoji.
_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_QUOTES = re.compile(rb"[{,]\s*'")


def hint(line: bytes) -> str:
    """The way out, to follow the parser's message; empty if nothing is known."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return TO_UTF8
    if not line.startswith(b"{"):
        return '; a row is one JSON object on a line, such as {"prompt": "…"}'
    if line == b"{":
        return "; a row is one JSON object on one line: jq -c . makes it one"
    if line.endswith(b"},"):
        return "; there are no commas between lines"
    if match := _HALF.search(line[:_LONGEST]):
        return f"; {match[0].decode()} is half a character"
    # What texts hold is no reason.
    line = _TEXT.sub(b'""', line[:_LONGEST])
    if _QUOTES.search(line) or _PYTHON.search(line):
        return "; that is Python: json.dumps writes JSON"
    if match := _NAN.search(line):
        return f"; JSON has no {match[1].decode()}: write null, or leave the field out"
    return ""
