"""The lines of a text file that answer a query best, by a cross-encoder.

    python examples/rerank.py texts.txt "What is a rose?" --model cross-encoder/ms-marco-MiniLM-L6-v2

A cross-encoder reads query and text together: it is slower than vectors, and more exact. So it ranks what they found.
"""

import argparse
import sys
from pathlib import Path

from rosebatch import LLM

parser = argparse.ArgumentParser()
parser.add_argument("texts", type=Path)
parser.add_argument("query")
parser.add_argument("--model", required=True)
parser.add_argument("--top", type=int, default=3)
args = parser.parse_args()

texts = [line for line in args.texts.read_text(encoding="utf-8").splitlines() if line]
with LLM(args.model) as llm:
    scores = [output.outputs.score for output in llm.score(args.query, texts)]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True)[: args.top]:
    sys.stdout.write(f"{score:.3f}  {text}\n")
