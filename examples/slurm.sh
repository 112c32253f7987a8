#!/usr/bin/env bash
# Several machines under Slurm: a job array serves the shards, and a last job joins them. Run it on the login node:
#   SHARDS=8 examples/slurm.sh prompts.jsonl answers.jsonl --model Qwen/Qwen3-0.6B
# Both files are on a file system that all machines share. Run the same command again to continue after a failure.
#SBATCH --job-name=rosebatch
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
set -euo pipefail
input=$1 output=$2

if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    array=$(sbatch --parsable --array="1-${SHARDS:-8}" "$0" "$@")
    sbatch --dependency="afterok:$array" --job-name=rosebatch-merge \
        --wrap "rosebatch merge $(printf '%q' "$input") --output $(printf '%q' "$output")"
    exit
fi

shift 2
# Exit code 3: all rows are served, and some of them failed. The output says which.
rosebatch generate "$input" --output "$output" --resume --quiet --data-parallel-size auto \
    --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@" || [ $? -eq 3 ]
