#!/usr/bin/env bash
# What scanned pages say, as JSON of a schema. PAGES may be a pattern of images or of PDFs, which need rosebatch[pdf].
set -euo pipefail
here=$(dirname "$0")
out=${OUT:-answers}
mkdir -p "$out"

rosebatch generate "${PAGES:-$here/receipts/*.png}" --prompt "Write what the receipt says as JSON." \
    --model "${MODEL:-Qwen/Qwen3-VL-2B-Instruct}" --json-schema "$here/receipts/schema.json" --max-tokens 1024 ${FLAGS:-} \
    --output "$out/receipts.jsonl" --resume

cat "$out/receipts.jsonl"
