"""The scripts for SLURM and SkyPilot serve each row once."""

import json
import os
import re
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from rosebatch.cli.app import main
from tests.examples.folder import FOLDER, TINY


@pytest.fixture
def shards(tmp_path):
    """A folder of 150 rows, one of them bad, and a ``PATH`` on which ``rosebatch`` writes down its arguments."""
    rows = [{"prompt_token_ids": [1 + i % 7, 2], "max_tokens": 2} for i in range(149)] + [{}]
    (tmp_path / "in put.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bin").mkdir()

    def command(name, text):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    command("rosebatch", """printf '%s\\0' "$@" >> calls; echo >> calls; [ "$1" = merge ] || exit 3""")

    def run(*arguments, **variables):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path)} | variables
        done = subprocess.run(
            ["bash", *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")

    def serve(monkeypatch):
        """Serve the shards by the arguments that were written down, on one process each."""
        monkeypatch.chdir(tmp_path)
        codes = []
        for call in (tmp_path / "calls").read_text().splitlines():
            arguments = call.split("\0")[:-1]
            if arguments[0] == "generate":
                arguments += ["--device", "cpu", "--load-format", "dummy", "--data-parallel-size", "1"]
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            codes.append(ended.value.code)
        return codes

    def indices(name):
        return [json.loads(row)["index"] for row in (tmp_path / name).read_text().splitlines()]

    return SimpleNamespace(folder=tmp_path, command=command, run=run, serve=serve, indices=indices)


def test_slurm(shards, monkeypatch):
    """The array serves every row once, and the last job joins the shards, also where rows failed."""
    shards.command(
        "sbatch",
        """echo "$@" >> submitted
        case "$*" in
            *--wrap*) bash -c "${@: -1}" ;;
            *) for i in 2 3 1; do SLURM_ARRAY_TASK_ID=$i SLURM_ARRAY_TASK_COUNT=3 bash "${@:3}"; done; echo 77 ;;
        esac""",
    )
    shards.run(str(FOLDER / "slurm.sh"), "in put.jsonl", "out put.jsonl", "--model", str(TINY), SHARDS="3")
    submitted = (shards.folder / "submitted").read_text().splitlines()
    assert [line.split()[:2] for line in submitted] == [
        ["--parsable", "--array=1-3"],
        ["--dependency=afterok:77", "--job-name=rosebatch-merge"],
    ]
    assert shards.serve(monkeypatch) == [0, 3, 0, 3]
    assert shards.indices("out put.jsonl") == list(range(150))


def test_skypilot(shards, monkeypatch):
    """Ranks begin at 0, and shards at 1: a share of the rows was served by nobody."""
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    for rank in range(2):
        variables = {"INPUT": "in put.jsonl", "OUTPUT": "out.jsonl", "MODEL": str(TINY)}
        assert variables.keys() == task["envs"].keys()
        shards.run("-c", task["run"], SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NUM_NODES="2", **variables)
    (merge,) = re.findall("'(rosebatch merge .*)'", (FOLDER / "skypilot.yaml").read_text())
    shards.run(
        "-c", merge.replace(task["envs"]["INPUT"], "'in put.jsonl'").replace(task["envs"]["OUTPUT"], "out.jsonl")
    )
    assert shards.serve(monkeypatch) == [3, 0, 3]
    assert shards.indices("out.jsonl") == list(range(150))
