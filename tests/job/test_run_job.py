"""The main job over a fake model: one result for each row, in input order, the same in every run."""

import itertools
import json
import threading

import pytest

from rosebatch.core.errors import RowError, UserError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.io.rows import FailedRow
from rosebatch.job.prepare import _GROUP, _GROUPS_AHEAD
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.waiting import no_thread_left
from tests.job.conftest import ListOutput
from tests.job.fake_model import FakeModel
from tests.job.lines import codes, texts, usage


def failed_row(index):
    """A row that the reader refused."""
    error = RowError("invalid_json", "not valid JSON")
    return FailedRow(index=index, where=f"line {index + 1}", metadata={}, error=error)


@pytest.mark.parametrize("lengths", [range(1, 41), range(40, 0, -1), [40, 1] * 20], ids=["rising", "falling", "mixed"])
def test_output_order_is_input_order(job, lengths):
    """Whichever row finishes first, the n-th result belongs to the n-th row."""
    lines = [{"prompt": f"row {i}", "max_tokens": n, "id": i} for i, n in enumerate(lengths)]
    rows, tally, _ = job.run(lines)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        text, counts = FakeModel().complete(f"row {i}", n), usage(len(f"row {i}"), n)
        assert row == {"id": i, "index": i, "text": text, "finish_reason": "length", "usage": counts}
    assert (tally.completed, tally.failed) == (40, 0)


def test_keys_come_in_a_fixed_order(job):
    """Carried fields come before results, so that diffs of two outputs stay readable."""
    good, bad = job.results([{"zeta": 1, "prompt": "x", "alpha": 2, "max_tokens": 1}, {"b": 1}])
    assert list(good) == ["zeta", "alpha", "index", "text", "finish_reason", "usage"]
    assert list(bad) == ["b", "index", "error"]


def test_error_rows_stand_in_their_place(job):
    """Every kind of failure beside rows that succeed: the job continues, and each row has one result."""
    good = {"prompt": "good", "max_tokens": 3}
    bad = [
        ({"id": "no prompt"}, "missing_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": "x", "top_p": 2}, "invalid_sampling"),
        ({"prompt": "x", "n": 0}, "invalid_sampling"),
        ({"prompt": "x", "logprobs": 21}, "invalid_sampling"),
        ({"prompt": "x", "suffix": "y"}, "unsupported_field"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "invalid_field"),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, "invalid_grammar"),
        ({"prompt": "x" * 100}, "prompt_too_long"),
        ({"prompt_token_ids": [1, 257]}, "invalid_token_id"),
        ({"prompt_token_ids": [-1]}, "invalid_token_id"),
        ({"prompt": "x", "logit_bias": {"257": 1}}, "invalid_token_id"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "invalid_token_id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_messages"),
    ]
    lines = [line for values, _ in bad for line in (values, good)]
    rows, tally, _ = job.run(lines, max_model_len=100)
    assert codes(rows[::2]) == [code for _, code in bad]
    assert {row["text"] for row in rows[1::2]} == {FakeModel().complete("good", 3)}
    assert [row["index"] for row in rows] == list(range(len(lines)))
    way = "--prompt-column or --prompt-template says which fields have it"
    message = f"line 1: expected one of prompt, messages, prompt_token_ids; got none; {way}"
    assert rows[0] == {"id": "no prompt", "index": 0, "error": {"code": "missing_prompt", "message": message}}
    assert (tally.completed, tally.failed) == (len(bad), len(bad))
    assert tally.errors["invalid_token_id"] == 4


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("token_id", [-1, 2**31, 2**32, 2**63, 10**29, -(2**63) - 1])
def test_token_ids_of_any_size_cost_one_row(job, token_id, echo):
    """64-bit arrays raise OverflowError, which would end the job on the reading thread; so would echoing such ids."""
    rows = job.results([{"prompt": "a", "max_tokens": 1}, {"prompt_token_ids": [token_id], "echo": echo}])
    assert codes(rows) == [None, "invalid_token_id"]


def test_prompt_lengths_around_the_limit(job):
    """One token must fit after the prompt, and the completion ends at the model's limit."""
    rows = job.results([{"prompt": "x" * n} for n in (98, 99, 100)], max_model_len=100)
    assert [row.get("usage") for row in rows] == [usage(98, 2), usage(99, 1), None]
    message = "line 3: the prompt has 100 tokens; with at least one to generate, 100 are allowed"
    assert rows[2]["error"] == {"code": "prompt_too_long", "message": message}


def test_finish_reasons(job):
    """End token, stop token, stop string and length each give their reason; ignore_eos continues past the end token."""
    cases = [
        ({}, ("good bye", "stop", 9)),
        ({"stop_token_ids": [ord(" ")]}, ("good", "stop", 5)),
        ({"stop": "d b"}, ("goo", "stop", 6)),
        ({"max_tokens": 3}, ("goo", "length", 3)),
        ({"ignore_eos": True, "max_tokens": 10}, ("good bye", "length", 10)),
        ({"max_tokens": 9}, ("good bye", "stop", 9)),
    ]
    lines = [{"prompt": "hello", **fields} for fields, _ in cases]
    rows, tally, _ = job.run(lines, model=FakeModel({"hello": b"good bye"}))
    found = [(row["text"], row["finish_reason"], row["usage"]["completion_tokens"]) for row in rows]
    assert found == [expected for _, expected in cases]
    assert tally.finish_reasons == {"stop": 4, "length": 2}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("two", "one "),
        (["three", "two"], "one "),
        (["o", "one"], ""),
        ("one two three", ""),
        ("wo t", "one t"),
        ("é", "one two three "),
        ("\U0001f600", "one two three é"),
        ("never", "one two three é\U0001f600 end"),
        ("end", "one two three é\U0001f600 "),
    ],
)
def test_stop_strings(job, stop, text):
    """Every byte is a token, so stop strings cross token borders; the text ends before the first match."""
    answer = "one two three é\U0001f600 end"
    (row,) = job.results([{"prompt": "x", "stop": stop}], model=FakeModel({"x": answer.encode()}))
    assert (row["text"], row["finish_reason"]) == (text, "stop")


def test_a_stop_string_in_the_prompt_does_not_count(job):
    """Only generated text is searched, not even a match that begins in the prompt."""
    (row,) = job.results([{"prompt": "END E", "stop": ["END", "EN"]}], model=FakeModel({"END E": b"ND more"}))
    assert row["text"] == "ND more"


def test_cached_tokens(job):
    """Whole blocks of an earlier prefix count; of an equal prompt, all tokens but one."""
    lines = [{"prompt": "0123456789", "max_tokens": 20}, {"prompt": "x", "max_tokens": 1}]
    lines += [{"prompt": prompt, "max_tokens": 1} for prompt in ("0123456789", "01234567", "0123456x", "x123456789")]
    _, tally, _ = job.run(lines, seqs=1)
    assert (tally.cached_tokens, tally.prompt_tokens, tally.output_tokens) == (19, 10 + 1 + 10 + 8 + 8 + 10, 25)


def test_a_preempted_row_is_not_counted_as_cached(job):
    """A resumed row reads its own blocks from the cache: that is no saving, and the text must not change."""
    lines = [{"prompt": f"row {i}", "max_tokens": 30} for i in range(6)]
    rows, tally, engine = job.run(lines, blocks=20, seqs=4)
    assert engine.stats.preemptions > 0
    assert [row["text"] for row in rows] == [FakeModel().complete(f"row {i}", 30) for i in range(6)]
    assert tally.cached_tokens == 20


def test_return_token_ids(job):
    """All generated tokens are returned, with the end token and those after a stop string."""
    lines = [{"prompt": "x"}, {"prompt": "x", "stop": "a"}, {}]
    rows = job.results(lines, model=FakeModel({"x": b"ab"}), return_token_ids=True)
    assert [row.get("token_ids") for row in rows] == [[97, 98, 256], [97], None]
    assert [row.get("text") for row in rows] == ["ab", "", None]


def test_without_a_tokenizer(job):
    """Token ids work and the text is null; rows that need text get an error. Nothing is ignored silently."""
    ids = {"prompt_token_ids": [1, 2], "max_tokens": 2}
    lines = [
        ids,
        {**ids, "n": 2, "presence_penalty": 1, "logit_bias": {"5": 1}, "min_tokens": 1},
        {"prompt": "x"},
        {"prompt": "x", "suffix": "y"},
        {"messages": [{"role": "user", "content": "x"}]},
        {**ids, "stop": "x"},
        {**ids, "response_format": {"type": "json_object"}},
        {**ids, "structured_outputs": {"choice": ["a"]}},
    ]
    one, two, *others = job.results(lines, without_tokenizer=True)
    assert one == {"index": 0, "text": None, "finish_reason": "length", "usage": usage(2, 2)}
    choices = [{"index": i, "text": None, "finish_reason": "length"} for i in range(2)]
    assert two == {"index": 1, "choices": choices, "usage": usage(2, 4)}
    assert codes(others) == ["no_tokenizer"] * 6


def test_messages_go_through_the_template(job):
    """The template's special tokens are one token each, and the answer begins where the template says."""
    ids = [*b"u:hi", 256, *b"a:"]
    lines = [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, {"prompt_token_ids": ids}]
    chat, by_ids = job.results(lines)
    assert chat["usage"] == usage(7, 1)
    assert chat["text"] == by_ids["text"][0] == chr(FakeModel().next_token(ids, [], None))


def test_no_chat_template(job, tokenizer):
    """With a base model the error says what to give instead."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    (row,) = job.results([chat], tokenizer=Tokenizer(tokenizer.backend))
    message = "line 1: the model has no chat template: give --chat-template FILE, or prompt instead of messages"
    assert row["error"] == {"code": "no_chat_template", "message": message}


def test_prompts_and_chats_in_one_group(job):
    """They are encoded apart and must return to the order of the rows."""
    kinds = [
        {"prompt": "u:hi<eos>a:"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [*b"u:hi", 256, *b"a:"]},
        {"messages": [{"role": "tool", "content": "hi"}]},
    ]
    rows = job.results([{**kinds[i % 4], "max_tokens": 5, "id": i} for i in range(200)])
    assert [row["id"] for row in rows] == list(range(200))
    assert len({row["text"] for i, row in enumerate(rows) if i % 4 != 3}) == 1
    assert all("error" in row for row in rows[3::4])


def test_no_rows(job):
    """An empty file ends at once with an empty result."""
    rows, tally, engine = job.run([])
    assert (rows, tally.completed, tally.failed, engine.stats.steps) == ([], 0, 0, 0)


class StopError(Exception):
    """Ends a job over endless rows."""


def test_rows_are_read_a_bounded_way_ahead(job):
    """Reading on during generation would fill memory; reading must end with the job."""
    last_read, finished = 0, []

    def lines():
        nonlocal last_read
        while True:
            last_read += 1
            yield {"prompt": "x", "max_tokens": 2}

    def before_step(plan):
        finished.append(sum(len(chunk.token_ids) == 1 for chunk in plan.chunks))
        if len(finished) == 10:
            assert [t for t in threading.enumerate() if t.name.startswith("rosebatch")]
            raise StopError

    with no_thread_left("rosebatch"), pytest.raises(StopError):
        job.run(lines(), model=FakeModel(before_step=before_step), seqs=4)
    # Finished rows, the window, the group in use and the groups that are being encoded.
    assert last_read <= sum(finished) + 2 * 4 + _GROUP + _GROUPS_AHEAD * _GROUP


def test_results_are_written_while_the_job_runs(job):
    """A run killed after an hour must leave an hour of results."""
    output, seen = ListOutput(), []
    model = FakeModel(before_step=lambda plan: seen.append(len(output.rows)))
    job.run([{"prompt": f"{i}", "max_tokens": 2} for i in range(20)], model=model, output=output, seqs=2)
    # Rows are written one step after they finish: their texts are decoded in between.
    assert seen[:8] == [0, 0, 0, 2, 2, 4, 4, 6]


def test_bad_rows_behind_an_unfinished_one_are_bounded(job):
    """Error rows wait in memory for an earlier row: a file of bad rows must not be read at once."""
    read, read_at_step = 0, []

    def rows():
        nonlocal read
        yield from job.rows([{"prompt": "x", "max_tokens": 2}])
        for index in range(1, 20_000):
            read = index
            yield failed_row(index)

    model = FakeModel(before_step=lambda plan: read_at_step.append(read))
    results, _, _ = job.run(rows=rows(), model=model)
    assert len(results) == 20_000
    assert read_at_step[0] < 10_000


@pytest.mark.parametrize("error", [UserError("in.parquet: unreadable"), OSError("gone"), ValueError("a bug")])
def test_an_exception_of_the_reader_ends_the_job(job, error):
    """It must not be lost, hang the job, or make a short output look finished."""
    output = ListOutput()

    def rows():
        yield from job.rows([{"prompt": "x", "max_tokens": 2}])
        raise error

    with pytest.raises(type(error), match=str(error)):
        job.run(rows=rows(), output=output)
    assert not output.finished


def test_an_exception_of_the_writer_ends_the_job(job, monkeypatch):
    """A full disk must not leave a thread running."""

    def full(self, index, row, *, failed):
        raise OSError("No space left on device")

    monkeypatch.setattr(ListOutput, "add", full)
    with no_thread_left("rosebatch"), pytest.raises(OSError, match="No space left"):
        job.run({"prompt": "x", "max_tokens": 1} for _ in itertools.count())


def test_two_runs_give_the_same_bytes(job, tmp_path):
    """Neither threads, time nor hash seeds may change a byte, with sampling, caching and preemption."""
    lines = [
        {"prompt": f"row {i % 7}", "max_tokens": 1 + i * 37 % 40, "temperature": i % 2, "id": f"id {i}", "extra": [i]}
        for i in range(150)
    ]
    lines[10] = {"prompt": "x" * 5000}
    source = write_lines(tmp_path / "in.jsonl", lines)
    outputs, preemptions = [], []
    for name in ("one.jsonl", "two.jsonl"):
        _, engine = job.run_file(source, tmp_path / name, limits={"blocks": 30, "seqs": 8}, return_token_ids=True)
        outputs.append((tmp_path / name).read_bytes())
        preemptions.append(engine.stats.preemptions)
    assert outputs[0] == outputs[1]
    assert preemptions[0] == preemptions[1] > 0
    assert outputs[0].count(b"\n") == 150


def sampled(job, lines, **run):
    """The texts of rows that are all sampled."""
    return [row["text"] for row in job.results([{"temperature": 1, "max_tokens": 12, **line} for line in lines], **run)]


def test_a_rows_own_seed_is_used_as_it_is(job):
    """The same seed and prompt give the same text anywhere, whatever --seed says; two seeds differ."""
    line = {"prompt": "x", "seed": 5}
    texts = sampled(job, [line, {"prompt": "y"}, {**line, "id": "other"}, {**line, "seed": 6}])
    assert texts[0] == texts[2] == FakeModel().complete("x", 12, seed=5)
    assert texts[3] == FakeModel().complete("x", 12, seed=6) != texts[0]
    assert sampled(job, [{"prompt": "z"}, line], seed=9)[1] == texts[0]
    assert sampled(job, [{"prompt": "x", "seed": 0}])[0] == FakeModel().complete("x", 12, seed=0)


def test_repeated_prompts_are_sampled_anew(job):
    """Without --seed, ten equal prompts give ten answers, and a second run the same ten."""
    lines = [{"prompt": "x"}] * 10
    texts = sampled(job, lines)
    assert len(set(texts)) == 10
    assert sampled(job, lines) == texts


def test_with_a_seed_the_order_does_not_matter(job):
    """A row gives the same alone and in a shuffled file; id and seed make a difference."""
    lines = [{"prompt": f"row {i % 5}", "id": i} for i in range(10)]
    texts = sampled(job, lines, seed=1)
    assert len(set(texts)) == 10
    assert sampled(job, lines[::-1], seed=1) == texts[::-1]
    assert sampled(job, lines[7:8], seed=1) == texts[7:8]
    assert not set(sampled(job, lines, seed=2)) & set(texts)
    assert len(set(sampled(job, [{"prompt": "x"}] * 3, seed=1))) == 1


def test_chats_and_token_ids_of_the_same_prompt_draw_the_same(job):
    """The seed follows from token ids, not from the form of the prompt."""
    lines = [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt_token_ids": [*b"u:hi", 256, *b"a:"]}]
    assert len(set(sampled(job, lines, seed=1))) == 1


def test_defaults_of_the_run_reach_the_engine(job):
    """Flags apply where a line says nothing, and only there."""
    rows = job.results([{"prompt": "x"}, {"prompt": "x", "max_tokens": 2}], defaults={"max_tokens": 5})
    assert [row["usage"]["completion_tokens"] for row in rows] == [5, 2]


def test_shared_prefixes_are_computed_once(job):
    """Four long prefixes in turn and a cache for one: without reordering, each would be evicted before its reuse."""
    beginnings = [chr(ord("a") + i) * 40 for i in range(4)]
    lines = [{"prompt": f"{beginnings[i % 4]}{i:02}", "max_tokens": 2} for i in range(32)]
    rows, tally, _ = job.run(lines, seqs=16, blocks=30, block_size=4, budget=44)
    assert [row["text"] for row in rows] == [FakeModel().complete(line["prompt"], 2) for line in lines]
    assert tally.cached_tokens >= 28 * 40


def test_truncated_prompts(job):
    """The last tokens of the prompt are kept; a short prompt stays whole."""
    cases = [("x" * 200 + "the end", 7, "the end"), ("x" * 200 + "the end", 3, "end"), ("short", 100, "short")]
    lines = [{"prompt": whole, "truncate_prompt_tokens": n, "max_tokens": 4} for whole, n, _ in cases]
    rows = job.results(lines, max_model_len=50)
    assert [row["text"] for row in rows] == [FakeModel().complete(left, 4) for _, _, left in cases]
    assert [row["usage"]["prompt_tokens"] for row in rows] == [7, 3, 5]


def test_echo(job):
    """The given prompt, or what truncation left of it, comes before the completion; stop strings do not search it."""
    lines = [
        {"prompt": "stop here", "echo": True, "stop": "stop"},
        {"prompt_token_ids": list(b"ids"), "echo": True},
        {"prompt": "the end", "echo": True, "truncate_prompt_tokens": 3},
    ]
    rows = job.results([{**line, "max_tokens": 4} for line in lines])
    prompts = ["stop here", "ids", "end"]
    assert [row["text"] for row in rows] == [prompt + FakeModel().complete(prompt, 4) for prompt in prompts]
    assert codes(job.results([{"prompt_token_ids": [1], "echo": True}], without_tokenizer=True)) == ["no_tokenizer"]


def test_a_chat_that_goes_on(job):
    """The answer begins where the last message ends."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    (row,) = job.results([{"messages": messages, "continue_final_message": True, "max_tokens": 3}])
    prompt = [*b"u:hi", 256, *b"a:Well, "]
    (expected,) = job.results([{"prompt_token_ids": prompt, "max_tokens": 3}])
    assert row["text"] == expected["text"]
    assert row["usage"]["prompt_tokens"] == len(prompt)


def test_a_suffix(job):
    """The prompt has the model's own form for filling in; a model without one refuses the row."""
    backend = byte_backend()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    backend.add_special_tokens(marks)
    before, after, middle = (backend.token_to_id(mark) for mark in marks)
    lines = [{"prompt": "def f(", "suffix": "return x", "max_tokens": 4, "n": 2}, {"prompt": "def f(", "max_tokens": 4}]
    ids = [before, *b"def f(", after, *b"return x", middle]
    by_ids = {"prompt_token_ids": ids, "max_tokens": 4}
    rows = job.results([*lines, by_ids], tokenizer=Tokenizer(backend), vocab_size=260)
    assert rows[0]["usage"]["prompt_tokens"] == len(ids)
    assert texts(rows[0]) == [rows[2]["text"]] * 2
    assert rows[1]["text"] == FakeModel().complete("def f(", 4)
    refused = job.results(lines)
    assert codes(refused) == ["unsupported_field", None]
    assert "suffix" in refused[0]["error"]["message"]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "{"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        (SamplingParams(grammar=GrammarSpec("choice", '["yes"]')), "yes"),
        (SamplingParams(grammar=GrammarSpec("json_object"), max_tokens=40), "{"),
        (SamplingParams(logit_bias={5: 1.0}, max_tokens=3), None),
        ({"logit_bias": {"5": 1.0}, "max_tokens": 3}, None),
    ],
)
def test_sampling_defaults_of_every_kind(job, tmp_path, sampling, expected):
    """Grammars and biases that were given as parameters, or as plain values, were lost or ended the job."""
    rows = [{"prompt": "a"}, {"prompt": "b", "structured_outputs": {"choice": ["own"]}}]
    source, target = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    result, _ = job.run_file(source, target, sampling=sampling)
    first, second = read_lines(target)
    assert result.num_failed == 0
    assert first["text"].startswith(expected or FakeModel().complete("a", 3))
    assert second["text"] == ("own" if expected else "own"[:3])
    assert json.loads(json.dumps(result.report["engine"]["sampling"])) == result.report["engine"]["sampling"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1}, "temprature is no sampling field of a row"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"response_format": {"type": "yaml"}}, "Invalid enum value 'yaml' - at `response_format.type`"),
        ({"structured_outputs": {"regex": "("}}, "the regex cannot be used"),
    ],
)
def test_impossible_sampling_defaults(job, tmp_path, sampling, message):
    """One error before anything runs, not one for each row, nor a traceback."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match=message):
        job.run_file(source, tmp_path / "out.jsonl", sampling=sampling)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
