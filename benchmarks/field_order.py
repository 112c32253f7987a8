"""How many prompt tokens come from the prefix cache where a template's lines stand in a bad and in a good order.

``python -m benchmarks.field_order [--rows 5000] [--length 60]`` runs whole jobs over the engine and a fake model that
takes no time, without and with ``--reorder-fields``. The table has columns of 2,000, 50 and 3 distinct texts, in this
order in the template. A token is a byte.

The last line is JSON: shares of the prompt tokens.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.options import options
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel, launch_fake, make_engine

_VALUES = {"name": 2000, "brand": 50, "terms": 3}
_PROMPT = "Sum up the offer.\nName: {name}\nBrand: {brand}\nTerms: {terms}\nSummary:"


def cached(source: Path, *, reorder: bool) -> float:
    """Run a job on this table; returns the share of its prompt tokens that came from the prefix cache."""
    engine = make_engine(FakeModel(), seqs=256, budget=8192, blocks=8192, block_size=16, max_model_len=4096)
    llm = LLM.of(launch_fake(engine, Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})))
    target = source.with_name("answers.jsonl")
    report = run_file(source, target, model=llm, prompt_template=_PROMPT, reorder_fields=reorder).report
    share: float = report["cached_tokens"] / report["prompt_tokens"]
    return round(share, 4)


def main() -> None:
    """Run both jobs."""
    given = options(__doc__, rows=5000, length=60)
    numbers = random.Random(0)
    texts = {
        name: ["".join(numbers.choices("abcdefghijklmnop", k=given.length)) for _ in range(count)]
        for name, count in _VALUES.items()
    }
    rows = [{name: numbers.choice(own) for name, own in texts.items()} | {"max_tokens": 1} for _ in range(given.rows)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "table.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = {"as_given": cached(source, reorder=False), "reordered": cached(source, reorder=True)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
