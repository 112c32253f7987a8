"""JSON by a schema, without and with tokens that the grammar forces, in turns.

``python -m benchmarks.json_by_schema --tokenizer FOLDER [--model configs/models/qwen3-0.6b.toml] [--rows 256 32]``. The
weights are random, the vocabulary is the tokenizer's, and the schema is that of an invoice: eight fields, most of whose
bytes are their names. Two engines take turns on one device. Answers are compared. The last line is JSON.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import options
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import StructuredOutputsParams
from rosebatch.llm.llm import LLM

_FIELDS: dict[str, dict[str, Any]] = {
    "invoice_number": {"type": "integer", "minimum": 1000, "maximum": 9999},
    "customer_name": {"type": "string", "maxLength": 12},
    "is_paid": {"type": "boolean"},
    "currency": {"enum": ["EUR", "USD", "GBP"]},
    "total_amount_in_cents": {"type": "integer", "minimum": 0, "maximum": 99999},
    "delivery_city": {"type": "string", "maxLength": 10},
    "has_discount": {"type": "boolean"},
    "payment_method": {"enum": ["credit card", "bank transfer", "cash"]},
}


def main() -> None:
    """Run both engines in turns."""
    given = options(
        __doc__,
        tokenizer=str,
        model="configs/models/qwen3-0.6b.toml",
        rows=[256, 32],
        repeats=3,
        kv_cache_memory="12GiB",
        batch_invariant=False,
    )
    structured = StructuredOutputsParams(json=schema())
    sampling = SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=structured)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = _with_vocabulary(Path(given.model), Path(given.tokenizer), Path(folder) / "model.toml")
        limits: dict[str, Any] = {"max_num_seqs": 1024, "kv_cache_memory": given.kv_cache_memory}
        limits |= {"batch_invariant": True} if given.batch_invariant else {}
        engines = {
            name: LLM(str(model), load_format="dummy", tokenizer=given.tokenizer, speculative=name, **limits)
            for name in ("off", "auto")
        }
    for rows in given.rows:
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        answers: dict[str, list[tuple[int, ...]]] = {}
        for repeat in range(given.repeats + 1):
            # Of other rows each time: drafts may be found in the last answers.
            numbers = range(rows * repeat, rows * (repeat + 1))
            prompts = [{"prompt_token_ids": [(7 * row + 3 * i) % 40_000 + 100 for i in range(200)]} for row in numbers]
            for name, llm in engines.items():
                began = time.perf_counter()
                outputs = llm.generate(prompts, sampling)
                if repeat:
                    seconds[name].append(round(time.perf_counter() - began, 3))
                answers[name] = [tuple(output.outputs[0].token_ids) for output in outputs]
                assert all(json.loads(output.outputs[0].text).keys() == _FIELDS.keys() for output in outputs)
        same = sum(one == other for one, other in zip(*answers.values(), strict=True))
        off, on = (statistics.median(each) for each in seconds.values())
        tokens = sum(map(len, answers["off"]))
        found.append({"rows": rows, "tokens": tokens, "same": same, "ratio": round(off / on, 3), **seconds})
        sys.stdout.write(f"{json.dumps(found[-1])}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def schema() -> dict[str, Any]:
    """Of the invoice."""
    return {"type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False}


def _with_vocabulary(model: Path, tokenizer: Path, target: Path) -> Path:
    """The model's shape with the vocabulary of a tokenizer, and its end token."""
    values = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = values["model"]["vocab"] | {each["content"]: each["id"] for each in values["added_tokens"]}
    text = re.sub(r"vocab_size = \d+", f"vocab_size = {max(ids.values()) + 1}", model.read_text(encoding="utf-8"))
    text = re.sub(r"eos_token_ids = \[[^]]*\]", f"eos_token_ids = [{ids[config['eos_token']]}]", text)
    target.write_text(text, encoding="utf-8")
    return target


if __name__ == "__main__":
    main()
