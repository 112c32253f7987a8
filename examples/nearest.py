"""Semantic search without a database: the nearest lines of a text file for each query.

    python examples/nearest.py texts.txt "plants with thorns" "machines" --model sentence-transformers/all-MiniLM-L6-v2

Each line of the file is a text; empty ones are left out. Vectors have length 1, so their dot product is the cosine of
the angle between them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from rosebatch import LLM

parser = argparse.ArgumentParser()
parser.add_argument("texts", type=Path)
parser.add_argument("queries", nargs="+")
parser.add_argument("--model", required=True)
parser.add_argument("--top", type=int, default=3)
args = parser.parse_args()

texts = [line for line in args.texts.read_text(encoding="utf-8").splitlines() if line]
with LLM(args.model) as llm:
    outputs = llm.embed([*texts, *args.queries])
vectors = np.array([output.outputs.embedding for output in outputs])
scores = vectors[len(texts) :] @ vectors[: len(texts)].T
for query, row in zip(args.queries, scores, strict=True):
    sys.stdout.write(f"{query}\n")
    for number in np.argsort(-row)[: args.top]:
        sys.stdout.write(f"  {row[number]:.3f}  {texts[number]}\n")
