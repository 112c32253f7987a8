#!/usr/bin/env bash
# From a folder of compressed prompts and a CSV file to compressed answers. The part file makes it safe to run again
# after a crash; after success, --resume leaves the answers alone. FLAGS go to rosebatch, such as --model path/to/model.
set -euo pipefail
here=$(dirname "$0")
out=${OUT:-answers}
mkdir -p "$out/prompts"

gzip -nc "$here/regression.jsonl" > "$out/prompts/regression.jsonl.gz"
cat > "$out/prompts/more.csv" <<'CSV'
id,prompt,max_tokens
haiku,"Write a haiku.
It may have three lines.",8
CSV

rosebatch generate "$out/prompts" ${FLAGS:-} --columns id \
    --output "$out/answers.jsonl.gz" --resume

gzip -dc "$out/answers.jsonl.gz"
