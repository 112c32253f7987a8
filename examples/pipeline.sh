#!/usr/bin/env bash
# A step of a CI pipeline: prompts with expected answers in, a failing exit code if any row fails or has another answer.
# Run it again after a time-out to continue it. FLAGS go to rosebatch, such as --model path/to/model.
set -euo pipefail
here=$(dirname "$0")
out=${OUT:-answers}
mkdir -p "$out"

rosebatch check "$here/regression.jsonl" ${FLAGS:-}
rosebatch generate "$here/regression.jsonl" ${FLAGS:-} \
    --output "$out/answers.jsonl" --resume --quiet \
    --report "$out/report.json" --report "$out/report.html"

python3 - "$out/answers.jsonl" <<'PY'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
wrong = [row for row in rows if row["expected"].lower() not in row["text"].lower()]
for row in wrong:
    print(f"{row['id']}: expected {row['expected']!r}, got {row['text']!r}")
print(f"{len(rows) - len(wrong)} of {len(rows)} answers are as expected")
sys.exit(bool(wrong))
PY
