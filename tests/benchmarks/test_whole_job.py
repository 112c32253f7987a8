"""The whole job beside the engine: their ratio means something only if both do the same work. No test measures time."""

from benchmarks.whole_job import make_texts, run_ids, run_text
from rosebatch import LLM
from tests.helpers.small_llama import save_tokenizer


def test_both_sides_compute_the_same(toy, tmp_path):
    """Both sides have as many tokens in and out, and the job really reads and writes a file."""
    save_tokenizer(tmp_path)
    texts = make_texts(30, 0)
    assert len(set(texts)) == 30
    reports = []
    for run, work in ((run_text, texts), (run_ids, None)):
        with LLM(toy, load_format="dummy", device="cpu", tokenizer=str(tmp_path), kv_cache_memory="8MiB") as llm:
            ids = [llm.get_tokenizer().encode(text) for text in texts]
            reports.append(run(llm, work or ids, 5))
    for name, value in {"completed": 30, "output_tokens": 150, "prompt_tokens": sum(map(len, texts))}.items():
        assert [report[name] for report in reports] == [value, value], name
    assert {"reading", "tokenizing", "detokenizing", "writing"} <= reports[0]["host_us_per_row"].keys()
