"""The whole job beside the engine: their ratio means something only if both do the same work. No test measures time."""

from rosebatch.bench.scripts.whole_job import make_texts, run_ids, run_text
from rosebatch.launch import Launched
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import FakeModel, byte_backend, make_engine


def test_both_sides_compute_the_same():
    """Both sides have as many tokens in and out, and the job really reads and writes a file."""
    tokenizer = Tokenizer(byte_backend())
    texts = make_texts(30, 0)
    assert len(set(texts)) == 30
    reports = []
    for run, work in ((run_text, texts), (run_ids, [list(text.encode()) for text in texts])):
        launched = Launched(make_engine(FakeModel(), blocks=400, budget=512), tokenizer, {"model": "fake"}, 0.0)
        reports.append(run(launched, work, 5))
    for name, value in {"completed": 30, "output_tokens": 150, "prompt_tokens": sum(map(len, texts))}.items():
        assert [report[name] for report in reports] == [value, value], name
    assert {"reading", "tokenizing", "detokenizing", "writing"} <= reports[0]["host_us_per_row"].keys()
