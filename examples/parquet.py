"""Parquet in, a folder of Parquet files out, and the folder read back as one table; all in the current folder.

Arguments go to rosebatch, such as --model path/to/model.
"""

import subprocess
import sys

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

CAPITALS = {
    "Austria": "Vienna",
    "Egypt": "Cairo",
    "England": "London",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Russia": "Moscow",
    "Spain": "Madrid",
}

questions = [f"What is the capital of {country}? Answer in one sentence." for country in CAPITALS]
prompts = pa.table(
    {
        "messages": [[{"role": "user", "content": question}] for question in questions],
        "max_tokens": [24] * len(questions),
        # Not a field of rosebatch: carried through to the answer.
        "capital": list(CAPITALS.values()),
    }
)
pq.write_table(prompts, "prompts.parquet")

command = ["generate", "prompts.parquet", "-o", "answers/", "--rows-per-file", "4", *sys.argv[1:]]
subprocess.run([sys.executable, "-m", "rosebatch", *command], check=True)

answers = ds.dataset("answers/")
rows = answers.to_table(["capital", "text", "usage"]).to_pylist()
right = sum(row["capital"] in row["text"] for row in rows)
tokens = sum(row["usage"]["completion_tokens"] for row in rows)
sys.stdout.write(f"{len(answers.files)} files, {len(rows)} answers of {tokens} tokens in all, {right} right\n")
