"""The same prompts through transformers, and both engines' token ids compared one by one.

In fp32 on a CPU both must be equal. First ``evaluate.py --device cpu --dtype float32 --model MODEL``, then
``against_transformers.py --model MODEL``. transformers answers one prompt at a time, without padding. The exit code is
1 where any answer differs.
"""

import argparse
import os
import sys
from itertools import zip_longest
from pathlib import Path

# As rosebatch sets it. Threads that spin while they wait take the cores from every other process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from evaluate import read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rosebatch.config.run import RunConfig
from rosebatch.model.source import find_model


def main() -> None:
    """Generate, and print each answer that differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="as for rosebatch; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), help="the folder that evaluate.py wrote")
    options = parser.parse_args()
    prompts, answers = (read_rows(options.out / name) for name in ("prompts.jsonl", "answers.jsonl"))

    folder = find_model(RunConfig(model=options.model, dtype="float32"), torch.device("cpu")).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Greedy, whatever sampling the model's authors recommend: only their end tokens stay.
    end_tokens = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end_tokens, pad_token_id=0)

    different = num_tokens = 0
    for number, (row, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        inputs = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            generated = model.generate(
                **inputs, max_new_tokens=row["max_tokens"], stop_strings=row["stop"], tokenizer=tokenizer
            )
        theirs = generated[0, inputs["input_ids"].shape[1] :].tolist()
        num_tokens += len(theirs)
        pairs = zip_longest(answer.get("token_ids", []), theirs)
        first = next((place for place, (our, their) in enumerate(pairs) if our != their), None)
        if first is not None:
            different += 1
            text = tokenizer.decode(theirs, skip_special_tokens=True)
            sys.stdout.write(
                f"prompt {number} differs from token {first} on:\n"
                f"  rosebatch: {answer.get('text')!r}\n  transformers: {text!r}\n"
            )
    sys.stdout.write(f"{len(prompts) - different} of {len(prompts)} answers are equal ({num_tokens} tokens)\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
