"""What a form of weights, or a switch, costs in quality: models on the same texts and questions, against a reference.

``python -m benchmarks.quality -m MODEL [MODEL ...] --against MODEL2 [--texts FILE] [--questions FILE] [--json]``.
``--settings`` and ``--against-settings`` take settings of ``LLM`` as JSON, such as ``'{"dtype": "float32"}'``. One
model after the other is loaded. All get the same token ids, so their tokenizers must be the same.

- Perplexity of texts (JSONL rows with ``text``), by the log-probability of each token but the first. Texts that are
  longer than ``--window``, or than the reference, are cut into windows that do not overlap.
- KL divergence of each position, by ``divergence`` in ``quality_figures.py``; the tokens that a model lists are its
  likeliest 20 and the text's own.
- Agreement of greedy tokens: each text's first 32 tokens are continued by ``--tokens`` tokens. ``equal`` is the share
  of continuations that are the reference's; the next column has the mean number of tokens before the first difference.
- Questions (JSONL rows with ``question``, and ``answer`` with the number after ``####``), behind worked examples as
  plain text. An answer is right if its last number is that number.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from benchmarks.options import options
from benchmarks.quality_figures import Scores, agreement, divergence, wilson
from rosebatch import LLM, SamplingParams, UserError

_DATA = Path(__file__).parent / "data"
# Log-probabilities that the library gives at most; the text's own token may come on top.
_TOP = 20
# Tokens of a text that are continued.
_BEGINNING = 32
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Work:
    """What every model is asked.

    Attributes:
        texts: whose tokens are scored, and continued.
        questions: of people, each with a number for an answer.
        examples: questions with their answers, before each question.
        window: most tokens of a text that are scored at once.
        tokens: of each continuation.
        answer_tokens: of an answer to a question, at most.
    """

    texts: Sequence[str]
    questions: Sequence[tuple[str, Decimal]]
    examples: str
    window: int
    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Said:
    """What a model said.

    Attributes:
        ids: the texts as it reads them.
        windows: of the texts' tokens, as they were scored.
        scores: of the windows.
        continued: greedy tokens behind the beginning of each text.
        answers: to the questions.
    """

    ids: list[list[int]]
    windows: list[list[int]]
    scores: Scores
    continued: list[list[int]]
    answers: list[str]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def last_number(text: str) -> Decimal | None:
    """The last number of a text; commas group its digits."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def read_work(texts: Path, questions: Path, **limits: int) -> Work:
    """By two files; the worked examples are our own.

    Args:
        texts: the file of texts.
        questions: the file of questions.
        limits: the other fields of ``Work``.

    Raises:
        UserError: an answer has no number after ``####``.
    """
    asked = []
    for row in rows_of(questions):
        number = last_number(row["answer"].partition("####")[2])
        if number is None:
            raise UserError(f"{questions}: an answer has no number after ####: {row['answer']!r}")
        asked.append((row["question"], number))
    examples = "".join(_question(row["question"], f" {row['answer']}\n\n") for row in rows_of(_DATA / "examples.jsonl"))
    return Work([row["text"] for row in rows_of(texts)], asked, examples, **limits)


def _question(question: str, answer: str = "") -> str:
    return f"Question: {question}\nAnswer:{answer}"


def ask(work: Work, model: str, settings: dict[str, Any], like: Said | None = None) -> Said:
    """Load a model, ask it everything, and give its memory back.

    Args:
        work: for all models.
        model: as ``--model`` takes it.
        settings: of ``LLM``.
        like: what the reference said, whose windows are scored; None for the reference itself.

    Raises:
        UserError: the model reads the texts as other tokens than the reference.
    """
    with LLM(model, **settings) as llm:
        tokenizer = llm.get_tokenizer()
        ids = [tokenizer.encode(text) for text in work.texts]
        if like is not None and ids != like.ids:
            raise UserError(f"{model}: its tokenizer is not the reference's: their tokens cannot be compared")
        # The engine generates a token behind a prompt that is only scored.
        longest = min(work.window, llm.plan.source.config.max_model_len - 1)
        windows = _cut(ids, longest) if like is None else like.windows
        scores = _score(llm, windows)
        greedy = SamplingParams(max_tokens=work.tokens, ignore_eos=True)
        continued = llm.generate([text[:_BEGINNING] for text in ids], greedy)
        answering = SamplingParams(max_tokens=work.answer_tokens, stop=("Question:",))
        answers = llm.generate([work.examples + _question(question) for question, _ in work.questions], answering)
        return Said(
            ids,
            windows,
            scores,
            [output.outputs[0].token_ids for output in continued],
            [output.outputs[0].text for output in answers],
        )


def _cut(ids: list[list[int]], window: int) -> list[list[int]]:
    """A window of one token has nothing to score."""
    cut = [text[start : start + window] for text in ids for start in range(0, len(text), window)]
    return [each for each in cut if len(each) > 1]


def _score(llm: LLM, windows: list[list[int]]) -> Scores:
    """Each output becomes arrays as it comes: its objects take many times the memory."""
    scores = {}
    for output in llm.stream(windows, SamplingParams(max_tokens=0, prompt_logprobs=_TOP)):
        known = [each for each in output.prompt_logprobs or () if each is not None]
        scores[int(output.request_id)] = Scores.of(output.prompt_token_ids[1:], known, _TOP + 1)
    return Scores.join([scores[number] for number in sorted(scores)])


def figures(work: Work, said: Said, reference: Said | None = None) -> dict[str, Any]:
    """The figures of a model; the reference's own are without those of a comparison."""
    right = sum(last_number(text) == number for text, (_, number) in zip(said.answers, work.questions, strict=True))
    low, high = wilson(right, len(work.questions))
    found: dict[str, Any] = {
        "nats_per_token": said.scores.nats,
        "perplexity": math.exp(said.scores.nats),
        "right": right,
        "right_share": right / len(work.questions),
        "right_interval": [low, high],
    }
    if reference is None:
        return found
    kl = divergence(reference.scores, said.scores)
    equal, common = agreement(said.continued, reference.continued)
    compared = {"kl_mean": float(kl.mean()), "kl_p99": float(np.percentile(kl, 99))}
    return found | compared | {"equal_share": equal, "tokens_before_difference": common}


def table(result: dict[str, Any]) -> Table:
    """The figures for people; the first row is the reference."""
    count, tokens = result["questions"], result["continued_tokens"]
    title = f"{result['scored_tokens']} tokens of {result['texts']} texts: nats a token, perplexity, KL in nats"
    shown = Table(Column("model", overflow="fold"), title=title, box=SIMPLE)
    for column in ("nats", "exp", "KL mean", "KL 99 %", "equal", f"of {tokens}", f"right of {count}"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in (result["reference"], *result["models"]):
        low, high = row["right_interval"]
        right = f"{row['right']} ({100 * low:.0f}-{100 * high:.0f} %)"
        compared = ["-"] * 4
        if "kl_mean" in row:
            compared = [f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.4f}"]
            compared += [f"{row['equal_share']:.0%}", f"{row['tokens_before_difference']:.1f}"]
        shown.add_row(
            Path(row["model"]).name, f"{row['nats_per_token']:.4f}", f"{row['perplexity']:.3f}", *compared, right
        )
    return shown


def main() -> None:
    """Ask the reference, then each model; show a table, or JSON."""
    given = options(
        __doc__,
        model={"nargs": "+", "required": True},
        against=str,
        texts=str(_DATA / "texts.jsonl"),
        questions=str(_DATA / "questions.jsonl"),
        window=1024,
        tokens=64,
        answer_tokens=256,
        settings={"type": json.loads, "default": {}},
        against_settings={"type": json.loads, "default": {}},
        json=False,
    )
    limits = {"window": given.window, "tokens": given.tokens, "answer_tokens": given.answer_tokens}
    work = read_work(Path(given.texts), Path(given.questions), **limits)
    reference = ask(work, given.against, given.against_settings)
    rows = []
    for model in given.model:
        said = ask(work, model, given.settings, reference)
        rows.append({"model": model, "settings": given.settings, **figures(work, said, reference)})
    result = {
        "texts": len(work.texts),
        "scored_tokens": len(reference.scores.own),
        "continued_tokens": work.tokens,
        "questions": len(work.questions),
        "reference": {"model": given.against, "settings": given.against_settings, **figures(work, reference)},
        "models": rows,
    }
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print(table(result))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
