"""Accuracy of a model on questions whose answers are numbers, in the style of gsm8k.

``python examples/evaluate/evaluate.py --model MODEL`` asks the questions of ``questions.jsonl``, the easiest first.
``--questions FILE`` takes another file, such as gsm8k's own, with ``{"question": "...", "answer": "... #### 42"}`` in
each line; ``--shots FILE`` likewise, all of it. Flags that ``--help`` does not list go to ``rosebatch generate``.

Every prompt begins with the same solved questions, the shots: most of it comes from the prefix cache. The folder of
``--out`` gets the prompts, the answers and a table of the wrong ones. Rerun a killed command to continue it.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A model without an end token would go on with a question of its own.
STOP = "\nQuestion:"

_MINUS = "\u2212"
_SIGN = rf"(?:[-{_MINUS}]?[$€£]?|[$€£][-{_MINUS}])"
_NUMBER = rf"{_SIGN}(?:(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# A fraction matches as a whole and outside the group: 3/4 is no 4. No number begins right behind a letter, a digit, a
# parenthesis or a slash: CO2 has none, and 5-10 ends in 10.
_FRACTION_OR_NUMBER = re.compile(rf"(?<![^\W_])(?<![)/])(?:(?:{_NUMBER} )?{_NUMBER} ?/ ?{_NUMBER}|({_NUMBER}))")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without commas and units; None without any. Fractions do not count."""
    numbers = [number for number in _FRACTION_OR_NUMBER.findall(text) if number]
    return Decimal(re.sub("[,$€£]", "", numbers[-1]).replace(_MINUS, "-")) if numbers else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    # Not splitlines(): it divides at characters that JSON may hold as they are.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def make_prompts(questions: list[dict[str, Any]], shots: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    """One greedy row of rosebatch for each question. It carries ``question`` and ``answer`` through to the result."""
    start = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
    settings = {"max_tokens": max_tokens, "temperature": 0, "stop": STOP}
    return [
        {"prompt": f"{start}Question: {row['question']}\nAnswer:", **settings}
        | {"question": row["question"], "answer": row["answer"]}
        for row in questions
    ]


def expected_number(row: dict[str, Any]) -> Decimal | None:
    """The number behind ``####`` in the reference answer."""
    return last_number(row["answer"].rpartition("####")[2])


def is_right(row: dict[str, Any]) -> bool:
    """Whether a result ends in the expected number. An error row has no text and is wrong."""
    found = last_number(row.get("text") or "")
    return found is not None and found == expected_number(row)


def confidence_interval(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (source: Wilson 1927, Probable inference)."""
    z, share = 1.96, right / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (middle - spread) / scale, (middle + spread) / scale


def write_wrong(path: Path, wrong: list[dict[str, Any]]) -> None:
    """A CSV table of wrong answers: the question, both numbers and the text, or the error in its place."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "expected", "found", "text"])
        for row in wrong:
            text = row["text"] if "text" in row else row["error"]["message"]
            found = last_number(row.get("text") or "")
            table.writerow([row["question"], expected_number(row), found, text])


def main() -> None:
    """Write the prompts, answer them and print the accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--questions", type=Path, default=HERE / "questions.jsonl", help="JSONL in gsm8k's form")
    parser.add_argument("--shots", type=Path, default=HERE / "shots.jsonl", help="solved questions before each prompt")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), help="folder of prompts, answers and wrong.csv")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of an answer")
    options, flags = parser.parse_known_args()

    prompts, answers, wrong_table = (options.out / name for name in ("prompts.jsonl", "answers.jsonl", "wrong.csv"))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = make_prompts(read_rows(options.questions), read_rows(options.shots), options.max_tokens)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    # The token ids are for against_transformers.py.
    command = ["generate", str(prompts), "-o", str(answers), "--resume", "--return-token-ids", *flags]
    code = subprocess.run([sys.executable, "-m", "rosebatch", *command], check=False).returncode
    # 3: some rows failed.
    if code not in (0, 3):
        sys.exit(code)

    results = read_rows(answers)
    wrong = [row for row in results if not is_right(row)]
    write_wrong(wrong_table, wrong)
    right, total = len(results) - len(wrong), len(rows)
    low, high = confidence_interval(right, total)
    interval = f"95 % interval {low:.1%} to {high:.1%}"
    sys.stdout.write(f"{right} of {total} right: {right / total:.1%} ({interval}); wrong ones: {wrong_table}\n")


if __name__ == "__main__":
    main()
