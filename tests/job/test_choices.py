"""Rows of several completions, several prompts, log-probabilities, least lengths and grammars, over the fake model."""

import json
import random
import re

import openai.types
import pytest
from tokenizers import processors

from rosebatch.progress import Progress
from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams
from rosebatch.tokenizer import Tokenizer, cut_at_stop
from tests.job.fake_model import scored


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def sample_seeds(seed, n):
    """Of a row's completions."""
    request = Request(index=0, prompt_token_ids=(1,), sampling=SamplingParams(seed=seed))
    return [request.sample(number).sampling.seed for number in range(n)]


def texts(row):
    """Of all its completions."""
    return [choice["text"] for choice in row["choices"]] if "choices" in row else [row["text"]]


def codes(rows):
    return [row["error"]["code"] if row.get("error") else None for row in rows]


def test_choices_of_one_prompt(job, fake_model):
    """In order, each with random numbers of its own; the prompt is computed once and counted once."""
    prompt = "0123456789"
    rows, tally, engine = job.run([{"prompt": prompt, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 6}])
    expected = [fake_model().complete(prompt, 6, seed=seed) for seed in sample_seeds(5, 3)]
    assert len(set(expected)) == 3
    choices = [{"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(expected)]
    assert rows == [{"index": 0, "choices": choices, "usage": usage(10, 18)}]
    # Of the prompt again no more than its last token, once for each further choice; then 5 tokens of each are read.
    assert engine.stats.computed_tokens == 10 + 2 + 3 * 5
    assert (tally.prompt_tokens, tally.output_tokens, tally.cached_tokens) == (10, 18, 0)


def test_greedy_choices_are_alike(job, fake_model):
    """Nothing but random numbers tells them apart."""
    rows, _, _ = job.run([{"prompt": "x", "n": 4, "max_tokens": 5}])
    assert texts(rows[0]) == [fake_model().complete("x", 5)] * 4


def test_choices_end_each_for_itself(job, fake_model):
    """Finished at different times, with reasons of their own; all wait for the last."""
    line = {"prompt": "x", "n": 20, "temperature": 1, "seed": 1, "max_tokens": 12, "stop": "e"}
    rows, tally, _ = job.run([line, {"prompt": "y", "max_tokens": 1}])
    wholes = [fake_model().complete("x", 12, seed=seed) for seed in sample_seeds(1, 20)]
    assert texts(rows[0]) == [whole.partition("e")[0] for whole in wholes]
    reasons = ["stop" if "e" in whole else "length" for whole in wholes]
    assert [choice["finish_reason"] for choice in rows[0]["choices"]] == reasons
    assert 2 < reasons.count("stop") < 18
    assert tally.finish_reasons == {"stop": reasons.count("stop"), "length": reasons.count("length") + 1}


@pytest.mark.parametrize("blocks", [64, 8], ids=["roomy", "preempted"])
def test_rows_with_different_numbers_of_choices(job, fake_model, blocks):
    """Results in input order, each row with its own completions, also where memory for all at once is lacking."""
    counts = [1 + i * 7 % 5 for i in range(30)]
    lines = [
        {"prompt": f"row {i}", "n": n, "temperature": 1, "seed": i, "max_tokens": 1 + i * 5 % 13}
        for i, n in enumerate(counts)
    ]
    rows, tally, engine = job.run(lines, blocks=blocks)
    assert [row["index"] for row in rows] == list(range(30))
    assert [texts(row) for row in rows] == [
        [fake_model().complete(line["prompt"], line["max_tokens"], seed=s) for s in sample_seeds(line["seed"], n)]
        for line, n in zip(lines, counts, strict=True)
    ]
    assert (engine.stats.preemptions > 0) == (blocks == 8)
    assert tally.completed == 30
    assert tally.finish_reasons == {"length": sum(counts)}


def test_more_choices_than_seats(job, fake_model):
    """A row may be wider than the batch, and than everything that waits at a time."""
    rows, _, engine = job.run([{"prompt": "x", "n": 50, "temperature": 1, "seed": 3, "max_tokens": 3}], seqs=4)
    assert texts(rows[0]) == [fake_model().complete("x", 3, seed=seed) for seed in sample_seeds(3, 50)]
    assert engine.stats.max_running == 4


def test_choices_do_not_depend_on_the_rest_of_the_file(job):
    """With --seed, a row alone gives what it gives beside others; two runs give the same."""
    lines = [{"prompt": f"row {i % 3}", "id": i, "n": 1 + i % 3, "temperature": 1, "max_tokens": 8} for i in range(9)]
    rows, _, _ = job.run(lines, seed=1)
    found = [texts(row) for row in rows]
    assert len({text for row in found for text in row}) == sum(map(len, found))
    assert [texts(row) for row in job.run(lines[::-1], seed=1)[0]] == found[::-1]
    assert texts(job.run(lines[5:6], seed=1)[0][0]) == found[5]


def test_token_ids_and_echo_of_each_choice(job):
    """Beside each text its own tokens; the prompt before each of them."""
    line = {"prompt": "abc", "n": 2, "temperature": 1, "max_tokens": 2, "echo": True}
    rows, _, _ = job.run([line], return_token_ids=True)
    for choice in rows[0]["choices"]:
        assert choice["text"] == "abc" + bytes(choice["token_ids"]).decode()
    assert "token_ids" not in rows[0]


def test_rows_and_tokens_are_counted_apart(job):
    """Progress and rates are about rows, tokens are those of all their completions, failures included in neither."""

    class Counted(Progress):
        """Remembers what it was told."""

        def __init__(self):
            super().__init__(None, enabled=False)
            self.told = []

        def advance(self, **what):
            self.told.append(what)

    progress = Counted()
    lines = [{"prompt": "ab", "n": 3, "max_tokens": 4}, {"prompt": "c", "max_tokens": 2}, {"prompt": "d", "n": 0}]
    _, tally, _ = job.run(lines, progress=progress)
    assert sorted(progress.told, key=str) == [{"failed": True}, {"output_tokens": 12}, {"output_tokens": 2}]
    assert (tally.completed, tally.failed) == (2, 1)
    assert (tally.prompt_tokens, tally.output_tokens) == (3, 14)
    assert tally.finish_reasons == {"length": 4}
    assert (len(tally.ttft), len(tally.tpot), len(tally.e2e)) == (4, 4, 4)


def choices_of(line):
    return line["response"]["body"]["choices"]


def test_several_prompts(job, fake_model):
    """Each gets its completions, one prompt's behind the other's; tokens are counted over all prompts."""
    (line,) = job.answer({"prompt": ["one", "two words", list(b"ids")], "n": 2, "max_tokens": 3})
    prompts = ["one", "one", "two words", "two words", "ids", "ids"]
    assert [choice["text"] for choice in choices_of(line)] == [fake_model().complete(p, 3) for p in prompts]
    assert [choice["index"] for choice in choices_of(line)] == list(range(6))
    counts = line["response"]["body"]["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (3 + 9 + 3, 18, 33)


def test_several_prompts_in_input_order(job, fake_model):
    """They share nothing with the requests around them but the batch."""
    bodies = [{"prompt": [f"{i} {j}" for j in range(1 + i % 4)], "max_tokens": 1 + i % 5} for i in range(20)]
    answers = job.answer(*bodies)
    for body, line in zip(bodies, answers, strict=True):
        expected = [fake_model().complete(prompt, body["max_tokens"]) for prompt in body["prompt"]]
        assert [choice["text"] for choice in choices_of(line)] == expected


def test_the_same_prompt_twice_in_a_request(job):
    """It asks for two answers, as it does where it stands on two lines of the file."""
    (line,) = job.answer({"prompt": ["x"] * 5, "temperature": 1, "max_tokens": 12})
    assert len({choice["text"] for choice in choices_of(line)}) == 5


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("x" * 300, "prompt_too_long"),
        ([257], "invalid_token_id"),
        ([-1], "invalid_token_id"),
        ("\ud800", "invalid_prompt"),
    ],
)
def test_one_prompt_that_cannot_be_served(job, fake_model, bad, code):
    """Its request fails as a whole, with none of its other prompts queued; those around it are served."""
    begun = set()
    model = fake_model(before_step=lambda plan: begun.update(chunk.sequence.request.index for chunk in plan.chunks))
    good = {"prompt": ["good", "day"], "max_tokens": 2}
    answers = job.answer(good, {"prompt": ["fine", bad, "fine too"], "n": 2}, good, model=model)
    assert codes(answers) == [None, code, None]
    assert begun == {0, 2}
    assert [len(choices_of(line)) for line in (answers[0], answers[2])] == [2, 2]


def test_every_answer_is_the_clients_type(job):
    """The official client parses choices, log-probabilities and several prompts, strictly."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answers = job.answer(
        {**chat, "n": 3, "temperature": 1, "logprobs": True, "top_logprobs": 3},
        {**chat, "logprobs": True},
        {"prompt": ["a", "bc"], "n": 2, "logprobs": 3},
        {"prompt": "a", "n": 2},
        {**chat, "response_format": {"type": "json_object"}, "n": 2, "logprobs": True, "max_tokens": 90},
        return_token_ids=True,
    )
    kinds = {"chat.completion": openai.types.chat.ChatCompletion, "text_completion": openai.types.Completion}
    bodies = [line["response"]["body"] for line in answers]
    bodies = [kinds[body["object"]].model_validate(body, strict=True) for body in bodies]
    assert [len(body.choices) for body in bodies] == [3, 1, 4, 2, 2]
    assert [[choice.index for choice in body.choices] for body in bodies] == [list(range(n)) for n in (3, 1, 4, 2, 2)]
    content = bodies[0].choices[2].logprobs.content
    assert "".join(token.token for token in content) == bodies[0].choices[2].message.content
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs == [] for token in bodies[1].choices[0].logprobs.content)
    for choice in bodies[2].choices:
        pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(choice.text.startswith(token, offset) for token, offset in pairs)
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in bodies[4].choices)


def written(tokens):
    """Log-probabilities as result rows have them."""

    def one(token_id, logprob):
        return {"token": bytes([token_id]).decode(errors="replace"), "token_id": token_id, "logprob": logprob}

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(*other) for other in t.top]} for t in tokens]


@pytest.mark.parametrize("blocks", [64, 9], ids=["roomy", "preempted"])
def test_logprobs_of_each_token(job, blocks):
    """Of every token one, in order, also where a completion was interrupted and its tokens were computed again."""
    lines = [{"prompt": f"row {i}", "max_tokens": 9, "logprobs": i % 3, "n": 1 + i % 2} for i in range(8)]
    rows, _, engine = job.run(lines, blocks=blocks)
    assert (engine.stats.preemptions > 0) == (blocks == 9)
    for i, row in enumerate(rows):
        for choice in row.get("choices", [row]):
            expected = [scored(byte, 5 + at, i % 3) for at, byte in enumerate(choice["text"].encode())]
            assert choice["logprobs"] == written(expected)
            assert len(expected) == 9


def test_logprobs_only_where_they_are_asked_for(job):
    """A row beside one that asks does not get them too, nor does one that asks for the other kind."""
    lines = [{"prompt": "abc", "max_tokens": 2, **more} for more in ({}, {"logprobs": 0}, {"prompt_logprobs": 0})]
    rows, _, _ = job.run(lines)
    names = [{"logprobs", "prompt_logprobs"} & set(row) for row in rows]
    assert names == [set(), {"logprobs"}, {"prompt_logprobs"}]


@pytest.mark.parametrize("budget", [64, 3], ids=["whole", "in-chunks"])
def test_logprobs_of_the_prompt(job, budget):
    """Of each of its tokens but the first, however they are computed; what others left in the cache is not enough."""
    lines = [{"prompt": "0123456789", "max_tokens": 2, **more} for more in ({}, {"prompt_logprobs": 2}, {})]
    lines.append({**lines[1], "n": 2})
    rows, _, _ = job.run(lines, budget=budget, seqs=1)
    ids = list(b"0123456789")
    expected = written([scored(token_id, at, 2) for at, token_id in enumerate(ids)])
    expected[0] |= {"logprob": None, "top_logprobs": []}
    assert [row.get("prompt_logprobs") for row in rows] == [None, expected, None, expected]


def test_an_echoed_prompt_with_its_logprobs(job):
    """One list over prompt and completion, with offsets into the text."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 3})
    (choice,) = choices_of(line)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == list(range(10))
    expected = [scored(byte, at, 1).logprob for at, byte in enumerate(choice["text"].encode())]
    assert choice["logprobs"]["token_logprobs"] == [None, *expected[1:]]
    assert choice["logprobs"]["top_logprobs"][0] is None


def test_each_choice_echoes_the_prompts_logprobs(job):
    """The lists are about the choice's text, which begins with the prompt."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 3})
    for choice in choices_of(line):
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_offsets_behind_a_special_token(job, make_backend):
    """Such as the BOS of an echoed prompt: every token behind it stood some places too late."""
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 256)])
    body = {"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 3}
    (line,) = job.answer(body, tokenizer=Tokenizer(backend))
    (choice,) = choices_of(line)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens[1:]) == choice["text"]
    assert offsets == [0, *range(10)]


@pytest.mark.parametrize(
    ("answer", "min_tokens", "stop", "text", "tokens"),
    [
        # Inside the protected tokens: it neither ends nor cuts, nor does it when it ends with the last of them.
        (b"a END b END c", 5, "END", "a END b ", 11),
        (b"a END b END c", 4, "END", "a ", 5),
        (b"a END b", 5, "END", "a END b", 8),
        (b"ENDENDEND", 6, "END", "ENDEND", 9),
        # Straddling their end.
        (b"abENDcd", 3, "END", "ab", 5),
        (b"abENDcd", 4, "END", "ab", 5),
        (b"abENDcd", 5, "END", "abENDcd", 8),
        # A character of two tokens at the border.
        ("éEND".encode(), 1, "END", "é", 5),
        ("éENDéEND".encode(), 5, "END", "éENDé", 10),
    ],
)
def test_stop_strings_and_a_least_length(job, fake_model, answer, min_tokens, stop, text, tokens):
    """The watching of tokens and the cutting of the text agree on which stop string counts."""
    line = {"prompt": "x", "min_tokens": min_tokens, "stop": stop}
    rows, _, _ = job.run([line], model=fake_model({"x": answer}))
    assert (rows[0]["text"], rows[0]["finish_reason"]) == (text, "stop")
    assert rows[0]["usage"]["completion_tokens"] == tokens


def test_a_protected_stop_string_beside_a_longer_one(job, fake_model):
    """What is kept of the text for the longer one holds the whole shorter one still."""
    line = {"prompt": "x", "min_tokens": 3, "stop": ["a", "abcdef"]}
    rows, _, _ = job.run([line], model=fake_model({"x": b"xxabbbbb"}))
    assert (rows[0]["text"], rows[0]["usage"]["completion_tokens"]) == ("xxabbbbb", 9)


def test_watching_agrees_with_cutting_behind_a_least_length(job, fake_model, tokenizer):
    """Random bytes, halves of characters at the border too: it ends with the first token that has something to cut."""
    rng = random.Random(0)
    pieces = [b"a", b"b", b"c", "é".encode(), b"\xc3", b"\xff"]
    for _ in range(300):
        answer, least = b"".join(rng.choices(pieces, k=12)), rng.randint(0, 8)
        stop = rng.choice([["ab"], ["ab", "cé"], ["a"], ["abc", "b"], ["ca", "éa"]])
        line = {"prompt": "x", "stop": stop, "min_tokens": least, "max_tokens": len(answer)}
        protected = len(tokenizer.decode(answer[:least]))
        for end in range(least + 1, len(answer) + 1):
            whole = tokenizer.decode(answer[:end])
            text = cut_at_stop(whole, stop, protected)
            if text != whole:
                break
        (row,), _, _ = job.run([line], model=fake_model({"x": answer}))
        assert (row["text"], row["usage"]["completion_tokens"]) == (text, end), (answer, stop, least)


def test_end_tokens_and_a_least_length(job, fake_model):
    """Neither the model's own nor the row's end it too early; of each choice."""
    lines = [
        {"prompt": "x", "min_tokens": 5, "n": 2, "max_tokens": 8},
        {"prompt": "x", "min_tokens": 2, "max_tokens": 8},
        {"prompt": "x", "min_tokens": 2, "stop_token_ids": [ord("b")], "max_tokens": 8},
        {"prompt": "x", "min_tokens": 8, "max_tokens": 8},
    ]
    rows, _, _ = job.run(lines, model=fake_model({"x": b"abc"}), return_token_ids=True)
    assert texts(rows[0]) == ["abc++"] * 2
    assert [choice["finish_reason"] for choice in rows[0]["choices"]] == ["stop"] * 2
    assert [(row["text"], row["finish_reason"]) for row in rows[1:]] == [
        ("abc", "stop"),
        ("a+c", "stop"),
        ("abc+++++", "length"),
    ]


def test_a_suffix(job, make_backend, fake_model):
    """The prompt as a model reads it that was trained to fill in the middle; one that was not refuses the row."""
    backend = make_backend()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    backend.add_special_tokens(marks)
    before, after, middle = (backend.token_to_id(mark) for mark in marks)
    lines = [{"prompt": "def f(", "suffix": "return x", "max_tokens": 4, "n": 2}, {"prompt": "def f(", "max_tokens": 4}]
    ids = [before, *b"def f(", after, *b"return x", middle]
    rows, _, _ = job.run(
        [*lines, {"prompt_token_ids": ids, "max_tokens": 4}], tokenizer=Tokenizer(backend), vocab_size=260
    )
    assert rows[0]["usage"]["prompt_tokens"] == len(ids)
    assert texts(rows[0]) == [rows[2]["text"]] * 2
    assert rows[1]["text"] == fake_model().complete("def f(", 4)
    refused, _, _ = job.run(lines)
    assert codes(refused) == ["unsupported_field", None]
    assert "suffix" in refused[0]["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["friend", "foe"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


def require_match(text):
    """It is JSON of the schema."""
    value = json.loads(text)
    assert set(value) == set(SCHEMA["properties"])
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert value["kind"] in ("friend", "foe")
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 130
    assert len(value["tags"]) <= 2
    assert all(isinstance(tag, bool) for tag in value["tags"])


def wrapped(schema):
    return {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}


@pytest.mark.parametrize("blocks", [100, 32], ids=["roomy", "preempted"])
def test_every_answer_matches_its_grammar(job, blocks):
    """Rows of four grammars and of none side by side, several completions of each, greedy and sampled."""
    kinds = [
        {"response_format": wrapped(SCHEMA)},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[0-9]{3}-(é|zz)+!"}},
        {"structured_outputs": {"choice": ["yes", "yes, sir", "né"]}},
        {"max_tokens": 9},
    ]
    lines = [
        {"prompt": f"row {i}", "max_tokens": 150, "n": 1 + i % 3, "temperature": i % 2, **kinds[i % 5]}
        for i in range(40)
    ]
    rows, tally, engine = job.run(lines, blocks=blocks)
    assert (engine.stats.preemptions > 0) == (blocks == 32)
    assert (tally.completed, tally.failed) == (40, 0)
    for i, row in enumerate(rows):
        for choice in row.get("choices", [row]):
            assert choice["finish_reason"] == ("stop" if i % 5 < 4 else "length")
            if i % 5 == 0:
                require_match(choice["text"])
            elif i % 5 == 1:
                assert isinstance(json.loads(choice["text"]), dict)
            elif i % 5 == 2:
                assert re.fullmatch("[0-9]{3}-(é|zz)+!", choice["text"])
            elif i % 5 == 3:
                assert choice["text"] in ("yes", "yes, sir", "né")
    assert len({text for row in rows[::5] for text in texts(row)}) > 8
    assert job.run(lines, blocks=blocks)[0] == rows


def test_a_grammar_of_all_rows(job):
    """Given for the run, as by a flag: rows without one of their own keep to it."""
    flags = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 150}
    lines = [{"prompt": "a"}, {"prompt": "b", "structured_outputs": {"choice": ["c"]}}, {"prompt": "d", "n": 2}]
    rows, _, _ = job.run(lines, defaults=flags)
    require_match(rows[0]["text"])
    assert rows[1]["text"] == "c"
    for text in texts(rows[2]):
        require_match(text)


def test_answers_that_are_cut_short_by_their_length(job):
    """No error: the finish reason says that they may not match, as it does elsewhere."""
    rows, _, _ = job.run([{"prompt": "x", "max_tokens": 3, "response_format": wrapped(SCHEMA)}])
    assert (rows[0]["finish_reason"], rows[0]["usage"]) == ("length", usage(1, 3))
    assert rows[0]["text"].startswith("{")


def test_a_grammar_that_does_not_compile(job, fake_model):
    """The row's error before anything is generated for it, and before the rows around it are served."""
    begun = set()
    model = fake_model(before_step=lambda plan: begun.update(chunk.sequence.request.index for chunk in plan.chunks))
    good = {"prompt": "x", "structured_outputs": {"choice": ["yes"]}}
    lines = [
        good,
        {"prompt": "x", "n": 3, "structured_outputs": {"regex": "("}, "id": "the second"},
        {"prompt": "x", "response_format": wrapped({"type": "objec"})},
        {"prompt": "x", "structured_outputs": {"choice": []}},
        {"prompt": "x", "structured_outputs": {"json": "{"}},
        good,
    ]
    rows, tally, _ = job.run(lines, model=model)
    assert codes(rows) == [None, *["invalid_grammar"] * 4, None]
    assert rows[1]["id"] == "the second"
    assert rows[1]["error"]["message"].startswith("line 2: the regex cannot be used: ")
    assert [rows[0]["text"], rows[5]["text"]] == ["yes", "yes"]
    assert begun == {0, 5}
    assert tally.errors == {"invalid_grammar": 4}


def test_a_grammar_that_fails_on_the_way(job, fake_model, monkeypatch):
    """An answer that is cut short there must not pass for one that matches; its neighbours are served all the same."""
    monkeypatch.setattr("rosebatch.grammar._MOST_STATES", 100)
    hard = {"structured_outputs": {"regex": "[ab]*a[ab]{30}!"}, "max_tokens": 400}
    model = fake_model({"all": bytes(random.Random(0).choices(b"ab", k=400))})
    lines = [
        {"prompt": "x", "max_tokens": 2},
        {"prompt": "all", **hard, "id": "the second"},
        {"prompt": "all", **hard, "n": 3},
        {"prompt": "x", "structured_outputs": {"choice": ["yes"]}},
    ]
    rows, tally, _ = job.run(lines, model=model, blocks=500)
    assert codes(rows) == [None, "grammar_failed", "grammar_failed", None]
    assert rows[1]["id"] == "the second"
    assert re.match("line 2: .*too many states", rows[1]["error"]["message"])
    assert rows[3]["text"] == "yes"
    assert (tally.completed, tally.output_tokens, tally.errors) == (2, 2 + 3, {"grammar_failed": 2})


def test_a_prompt_alone(job):
    """Scoring a text, as evaluations do: the token that the engine cannot do without stands nowhere."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2})
    body = line["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["Say it:"] * 2
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [list("Say it:")] * 2
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    rows, tally, _ = job.run(
        [{"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 0}, {"prompt": "abc", "max_tokens": 0}]
    )
    assert (rows[0]["text"], rows[0]["usage"]["completion_tokens"], len(rows[0]["prompt_logprobs"])) == ("", 0, 3)
    assert rows[1]["error"]["message"] == "line 2: max_tokens must be >= 1, got 0"
    assert tally.output_tokens == 0
