#!/usr/bin/env bash
# A caption for each image of a folder. MODEL is a model that sees, PHOTOS a folder or a pattern, FLAGS go to rosebatch.
set -euo pipefail
here=$(dirname "$0")
out=${OUT:-answers}
mkdir -p "$out"

rosebatch generate "${PHOTOS:-$here/photos}" --prompt "Describe the image in one sentence." \
    --model "${MODEL:-Qwen/Qwen3-VL-2B-Instruct}" --max-tokens 64 ${FLAGS:-} \
    --output "$out/captions.csv" --resume

cat "$out/captions.csv"
