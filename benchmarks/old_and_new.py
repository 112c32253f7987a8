"""Two trees of this project in turns on one machine: old, new, new, old.

``python -m benchmarks.old_and_new --old FOLDER --scenario suite gpt2-sampled [--repeats 7] [--turns 4]`` runs
``rosebatch bench`` of either tree in a process of its own. The table has, for each scenario, the median seconds of each
turn and the ratio of their means. Two turns of one tree differ, too: that is the noise.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median_low

from benchmarks.options import options

NEW = Path(__file__).resolve().parents[1]
# So that neither tree always comes first.
ORDER = ("old", "new", "new", "old")


def run(tree: Path, scenarios: list[str], repeats: int) -> dict[str, float]:
    """Median seconds of each scenario and model, in a process of that tree."""
    names = [argument for name in scenarios for argument in ("--scenario", name)]
    paths = [str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "rosebatch", "bench", *names, "--repeats", str(repeats), "--json"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = [each for each in json.loads(done.stdout)["results"] if each["kind"] == "run"]
    return {f"{each['scenario']}, {each['model']}": median_low(each["seconds"]) for each in results}


def main() -> None:
    """Take the turns."""
    args = options(__doc__, old=Path, scenario=["suite"], repeats=5, turns=len(ORDER))
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"old": [], "new": []})
    for turn in range(args.turns):
        name = ORDER[turn % len(ORDER)]
        for case, median in run(args.old.resolve() if name == "old" else NEW, args.scenario, args.repeats).items():
            seconds[case][name].append(median)
            sys.stderr.write(f"{name} {case} {median:.4f}\n")
    sys.stdout.write("| scenario | old, s | new, s | new / old |\n| --- | --- | --- | --- |\n")
    for case, of in seconds.items():
        old, new = (", ".join(f"{each:.4f}" for each in of[name]) for name in ("old", "new"))
        ratio = f"{mean(of['new']) / mean(of['old']):.3f}" if of["old"] and of["new"] else ""
        sys.stdout.write(f"| {case} | {old} | {new} | {ratio} |\n")


if __name__ == "__main__":
    main()
