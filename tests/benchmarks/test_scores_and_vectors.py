"""``python -m benchmarks.scores_and_vectors``: all engines have the same rows, and results are compared row by row."""

import json
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import scores_and_vectors
from benchmarks.scores_and_vectors_engines import ENGINES
from benchmarks.scores_and_vectors_works import WORKS


@pytest.mark.parametrize("work", WORKS)
def test_rows_of_a_run(work):
    """Engines that draw the rows themselves must get the same ones, and other ones in each run."""
    rows, again, others = (WORKS[work].make(5, random.Random(seed)) for seed in (0, 0, 1))
    assert rows == again != others


def test_fewer_rows_are_the_first_ones():
    """Results of a share of the rows are compared with those of all."""
    few, many = (WORKS["continuations"].make(count, random.Random(3)) for count in (2, 7))
    assert few == (many[0][:2], many[1][:2])


def test_a_word_is_a_token(tmp_path):
    """Unknown words would be one token, the same for all: no engine would have the lengths that are told."""
    WORKS["texts"].write(tmp_path / "model", True, torch.float32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    texts, _ = WORKS["texts"].make(50, random.Random(0))
    found = [tokenizer.encode(text) for text in texts]
    assert [len(each.ids) for each in found] == [len(text.split()) + 2 for text in texts]
    assert not any("[UNK]" in each.tokens for each in found)


def test_results_agree(tmp_path):
    """Scores of the wrong tokens, or in another order, would be figures of another work."""
    WORKS["continuations"].write(tmp_path / "model", True, torch.float32)
    spec = {"work": "continuations", "folder": str(tmp_path / "model"), "device": "cpu", "args": {}}
    rows = WORKS["continuations"].make(3, random.Random(0))
    ours, theirs = (np.array(ENGINES[name](spec)[1][""](*rows)) for name in ("rosebatch", "transformers"))
    assert scores_and_vectors.agreement(ours, theirs)["error"] < 1e-5


def test_agreement():
    """What all rows have in common is no agreement."""
    ours = np.array([[100.0, 1.0], [100.0, -1.0]])
    assert scores_and_vectors.agreement(ours, ours) == {"correlation": 1, "error": 0}
    assert scores_and_vectors.agreement(ours, ours[::-1])["correlation"] == -1
    assert scores_and_vectors.agreement(np.array([1.0, 3.0, 9.0]), np.array([1.5, 3.5])) == {
        "correlation": 1,
        "error": 0.5,
    }


def test_an_engine_that_fails_costs_only_itself(tmp_path, capsys):
    """The others are measured, and the failed one's own words are told."""
    fields = {"folder": "", "device": "cpu", "args": {}, "rows": 1, "shares": {}, "repeats": 1}
    spec = {"engine": "nothing", "work": "texts", **fields, "results": str(tmp_path)}
    engine = scores_and_vectors.Engine(spec, scores_and_vectors.sys.executable, "", tmp_path / "log")
    (found,) = scores_and_vectors._measure([engine], tmp_path)
    engine.end()
    assert "KeyError: 'nothing'" in found["error"]
    assert json.dumps(found)
    capsys.readouterr()
