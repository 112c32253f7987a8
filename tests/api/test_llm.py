"""The library as a stranger's script uses it: vLLM's names, prompts of every kind, one model used again and again."""

import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch

from rosebatch import LLM, GrammarSpec, PoolingParams, SamplingParams, run_file
from rosebatch.io.text_only import plain_message
from tests.api.conftest import NAME
from tests.helpers.waiting import PATIENCE_SECONDS

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_plain_vllm_script(llm):
    """The names that such a script reads all exist and hold what they say."""
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, n=2, logprobs=3))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished and output.error is None
        assert [each.index for each in output.outputs] == [0, 1]
        for each in output.outputs:
            assert each.finish_reason in ("stop", "length")
            assert 1 <= len(each.token_ids) <= 5
            chosen = [scored[token].logprob for scored, token in zip(each.logprobs, each.token_ids, strict=True)]
            assert each.cumulative_logprob == pytest.approx(sum(chosen))
            assert len(each.token_times) == len(each.token_ids)
            assert 0 < each.token_times[0] <= each.token_times[-1] == max(each.token_times)
            assert all(3 <= len(scored) <= 4 for scored in each.logprobs)
            assert all(min(scored.values(), key=lambda one: one.rank or 99).rank == 1 for scored in each.logprobs)
    assert outputs[0].outputs[0].token_ids != outputs[0].outputs[1].token_ids


def test_text_ids_and_mappings_mix(llm):
    """Each kind of prompt gives the completion of the same tokens."""
    by_text = llm.generate("red roses", SHORT)[0]
    ids = by_text.prompt_token_ids
    arrays = [np.array(ids), list(map(np.int32, ids)), {"prompt_token_ids": torch.tensor(ids)}]
    others = llm.generate([{"prompt": "red roses"}, {"prompt_token_ids": ids}, ids, "red roses", *arrays], SHORT)
    others += llm.generate(np.array(ids), SHORT) + llm.generate(arrays[1], SHORT) + llm.generate(np.array([ids]), SHORT)
    assert texts(others) == [by_text.outputs[0].text] * 10
    assert [output.prompt for output in others[:5]] == ["red roses", None, None, "red roses", None]
    assert others[4].prompt_token_ids == ids
    assert texts(llm.generate(ids, SHORT)) == [by_text.outputs[0].text], "a list of ids is one prompt"


def test_token_ids_of_any_library(llm):
    """None is taken for a number of the same bits: a sign, a null, a fraction and a truth value are errors."""
    kinds = [np.array, torch.tensor, pa.array, lambda ids: pa.chunked_array([ids[:1], ids[1:]])]
    whole = [kind([5, 1, 7]) for kind in kinds] + [pa.array([5, 1, 7], pa.uint8()), torch.tensor([5, 1, 7]).short()]
    found = llm.generate(whole, SHORT)
    assert [output.prompt_token_ids for output in found] == [[5, 1, 7]] * len(whole)
    assert {type(each) for output in found for each in output.prompt_token_ids} == {int}
    others = [kind(ids) for kind in kinds for ids in ([5.0, 1.0], [True, False])]
    others += [pa.array([5, None]), pa.chunked_array([[5, -1]])]
    others += [torch.tensor([5.0, 1.0], requires_grad=True), torch.tensor([5.0]).bfloat16()]
    found = llm.generate([*others, *(kind([5, -1]) for kind in kinds[:3])], SHORT, on_error="return")
    codes = ["invalid_prompt"] * len(others) + ["invalid_token_id"] * 3
    assert [output.error_code for output in found] == codes


def test_columns_of_arrow_are_prompts(llm):
    """Those of a table were refused, whose lists and texts are Arrow's own."""
    table = pa.table({"ids": [[5, 1, 7], [8, 9]], "text": ["a", "b"]})
    for ids in (table["ids"], table["ids"].chunk(0), table["ids"].cast(pa.large_list(pa.uint16()))):
        assert [output.prompt_token_ids for output in llm.generate(ids, SHORT)] == [[5, 1, 7], [8, 9]]
    for column in (table["text"], table["text"].dictionary_encode()):
        assert [output.prompt for output in llm.generate(column, SHORT)] == ["a", "b"]
    found = llm.generate(pa.chunked_array([[[5], None, []]]), SHORT, on_error="return")
    assert [output.error_code for output in found] == [None, "invalid_prompt", "empty_prompt"]
    assert llm.generate(pa.chunked_array([[5], [1, 7]]), SHORT)[0].prompt_token_ids == [5, 1, 7], "ids are one prompt"


@pytest.mark.parametrize("first", [True, 1.0, np.True_, np.float64(1)])
@pytest.mark.parametrize("length", [3, 99])
def test_truth_values_and_floats_are_no_token_ids(llm, first, length):
    """Of long prompts only small ids are looked at one by one: a truth value is 0 or 1."""
    prompts = [[first] + [7] * length, [7] * length + [first], [1, 0] + [7] * length]
    found = llm.generate(prompts, SHORT, on_error="return")
    assert [output.error_code for output in found] == ["invalid_prompt", "invalid_prompt", None]


def test_parameters_of_each_prompt(llm):
    """One list, as long as the prompts; another length is an error before anything runs."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 2]
    with pytest.raises(ValueError, match="3 parameters for 2 prompts"):
        llm.generate(["a", "b"], params)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """Inside, prompts with the same beginning are brought together."""
    prompts = [f"{word} {number}" for number in range(12) for word in ("rose", "thorn")]
    assert [output.prompt for output in llm.generate(prompts, SHORT)] == prompts


def test_chat(llm):
    """One conversation or several; the prompt is what the template made of it."""
    chat = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(chat, SHORT)
    assert one.prompt == "<|user|>Hi<|end|><|assistant|>"
    assert texts(llm.chat([chat, chat], SHORT)) == texts([one]) * 2
    (going_on,) = llm.chat([*chat, {"role": "assistant", "content": "Well"}], SHORT, continue_final_message=True)
    assert going_on.prompt.endswith("<|assistant|>Well")
    (closed,) = llm.chat(chat, SHORT, add_generation_prompt=False)
    assert closed.prompt == "<|user|>Hi<|end|>"


def test_a_stream_without_end(llm):
    """Results come while the input goes on; no more is read than bounded memory holds; closing it frees the model."""
    read = itertools.count()
    stream = llm.stream((f"rose {next(read)}" for _ in itertools.count()), SHORT)
    outputs = list(itertools.islice(stream, 40))
    stream.close()
    assert len({output.request_id for output in outputs}) == 40
    assert next(read) < 40 + 2 * 8 + 64 + 4 * 64 + 8, "it reads a bounded number ahead"
    assert texts(llm.generate("rose", SHORT)) == texts(llm.generate("rose", SHORT))


def test_a_stream_gives_results_before_its_input_goes_on(llm):
    """An input that waits for results, such as an agent's, must get them."""
    done = threading.Event()

    def prompts():
        yield "first"
        assert done.wait(PATIENCE_SECONDS), "the result of the first prompt has to come before the second is read"
        yield "second"

    outputs = []
    for output in llm.stream(prompts(), SHORT):
        outputs.append(output)
        done.set()
    assert [output.prompt for output in outputs] == ["first", "second"]


def test_an_error_of_the_input_ends_the_stream(llm):
    """And leaves the model as it was."""

    def prompts():
        yield "a"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(llm.stream(prompts(), SHORT))
    assert llm.generate("b", SHORT)


def test_streamed_parameters(llm):
    """One for each prompt, from an iterable of their own."""
    params = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1))
    outputs = {output.prompt: output for output in llm.stream(iter(["a", "b"]), params)}
    assert [len(outputs[prompt].outputs[0].token_ids) for prompt in "ab"] == [3, 1]


def test_a_forked_process(llm, monkeypatch):
    """It has neither the threads nor the connections of its parent: its first call waited for ever."""
    monkeypatch.setattr("os.getpid", lambda: 0)
    with pytest.raises(RuntimeError, match="belongs to the process that made it"):
        llm.generate("a", SHORT)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ("x" * 5000, "prompt_too_long"),
        ([10**6], "invalid_token_id"),
        ({"text": "x"}, "missing_prompt"),
        # The text alone was answered, with other parameters than asked for.
        ({"prompt": "x", "multi_modal_data": {"image": "x.png"}}, "unsupported_field"),
        ({"prompt": "x", "max_tokens": 1}, "unsupported_field"),
        ({"prompt": "x", "tpyo": 1}, "unsupported_field"),
        ({"prompt": 5}, "invalid_prompt"),
        (3.5, "invalid_prompt"),
        (["a"], "invalid_prompt"),
        # Its bytes were token ids.
        (b"ab", "invalid_prompt"),
        (bytearray(b"ab"), "invalid_prompt"),
        # Its order is nobody's.
        ({97, 98}, "invalid_prompt"),
        # The text was completed.
        ({"prompt_token_ids": "ab"}, "invalid_prompt"),
        ({"prompt_token_ids": {"prompt": "ab"}}, "invalid_prompt"),
        # These raised, also where errors are returned.
        (np.array(5), "invalid_prompt"),
        ({1: 2}, "missing_prompt"),
    ],
)
def test_a_bad_prompt_costs_itself(llm, prompt, code):
    """It is that output's error, or raises: the caller chooses."""
    good, bad = llm.generate(["good", prompt], SHORT, on_error="return")
    assert good.error is None and good.outputs
    assert bad.error_code == code and bad.error and bad.outputs == []
    # Its place in this call, not among all prompts that the model has had.
    with pytest.raises(ValueError, match=r"prompt 1\b"):
        llm.generate(["good", prompt], SHORT)
    assert llm.generate("good", SHORT), "the model goes on"


def test_a_mapping_is_a_good_prompt(llm):
    """Other libraries' scripts leave keys without a value in it."""
    plain, mapped, ids = llm.generate(
        ["ab", {"prompt": "ab", "multi_modal_data": None}, {"prompt_token_ids": [97, 98], "prompt": None}], SHORT
    )
    assert plain.outputs[0].token_ids == mapped.outputs[0].token_ids
    assert ids.prompt_token_ids == [97, 98]


@pytest.mark.parametrize("given", [{"max_tokens": 2}, {"max_tokens": 2, "temperature": 0}, "greedy"])
def test_parameters_of_another_type(llm, given):
    """It said "got str", or that a dict has two entries for one prompt."""
    name = type(given).__name__
    with pytest.raises(ValueError, match=f"^sampling_params must be SamplingParams, got {name}$"):
        llm.generate("a", given)


CYCLE = []
CYCLE += [CYCLE, CYCLE]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"content": [{"type": "image_url", "image_url": "data:,"}]},
            "messages[0].content[0]: the model takes no images: its architecture, LlamaForCausalLM,",
        ),
        # A name that JSON cannot have raised, and what has itself inside was looked through for ever.
        ({"content": "a", "\ud800": 1}, "surrogates not allowed"),
        ({"content": "a", "of": CYCLE}, "messages are nested more than 600 levels deep"),
    ],
)
def test_bad_chats_cost_themselves(llm, message, told):
    """As prompts do."""
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", **message}]]
    good, bad = llm.chat(chats, SHORT, on_error="return")
    assert good.outputs and bad.error_code == "invalid_messages" and told in bad.error


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_what_has_itself_inside(llm, name):
    """A call that never ended."""
    given = CYCLE if name == "tools" else {"a": CYCLE}
    with pytest.raises(ValueError, match=f"{name} are nested more than 600 levels deep"):
        llm.chat([{"role": "user", "content": "a"}], SHORT, **{name: given})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fused_mpl": True}, "unknown setting fused_mpl; did you mean fused_mlp"),
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"prefix_cache": "yes"}, "prefix_cache must be True or False"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"kv_cache_memory": "lots"}, "must be like 512MiB or 4GiB"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not served"),
        ({"enable_lora": True}, "enable_lora=True is not served"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of auto, fp8, none, got 'fp8_e5m2'"),
        ({"device": "cpu", "fused_sampler": True}, "no meaning on cpu"),
        ({"max_model_len": 10**6}, "max-model-len"),
        ({"on_error": "explode"}, "unknown setting on_error"),
    ],
)
def test_a_bad_setting_is_a_value_error(setting, message):
    """With the reason, before the model is loaded."""
    with pytest.raises(ValueError, match=message):
        LLM(NAME, **setting)


def test_a_bad_choice_of_errors(llm):
    with pytest.raises(ValueError, match="on_error must be raise or return"):
        llm.generate("a", SHORT, on_error="explode")


def test_vllms_names_of_our_switches():
    """A script that sets them gets what it asks for."""
    nothing = {"seed": 0, "kv_cache_dtype": "auto", "enable_lora": False, "runner": "generate", "cpu_offload_gb": 0}
    with LLM(NAME, enable_prefix_caching=False, enable_chunked_prefill=False, dtype="float", **nothing) as llm:
        assert not llm.plan.switches.prefix_cache and not llm.plan.switches.chunked_prefill
        assert llm.plan.source.dtype == torch.float32
        assert llm.plan.source.config.kv_cache_dtype == "auto"
        assert llm.plan.source.name == NAME


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_per_token_head"])
def test_vllms_names_of_an_fp8_cache(name):
    """Twice the tokens, whichever of them a script has."""
    with LLM(NAME, kv_cache_dtype=name, kv_cache_memory="4MiB", max_num_seqs=4) as llm:
        assert llm.plan.source.config.kv_cache_dtype == "fp8"
        (output,) = llm.generate("a", SHORT)
        assert output.outputs[0].token_ids


def test_seeds(llm):
    """Each call samples anew; with a base seed the result is a function of prompt and seed."""
    # Tokens, not texts: most ids of this model stand for no text.
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    assert tokens(llm.generate(["a"], sampled)) != tokens(llm.generate(["a"], sampled))
    first, second = llm.generate(["a", "a"], sampled)
    assert tokens([first]) != tokens([second])
    alone = tokens(llm.generate(["b"], sampled, seed=5))
    assert tokens(llm.generate(["a", "b"], sampled, seed=5))[1:] == alone
    own = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
    assert tokens(llm.generate(["a"], own)) == tokens(llm.generate(["a"], own))


def test_a_grammar(llm):
    """The answer is one of the choices, whatever the model wants to say."""
    params = SamplingParams(max_tokens=20, grammar=GrammarSpec("choice", '["red", "blue"]'))
    assert texts(llm.generate(["a", "b"], params))[0] in ("red", "blue")


def test_prompt_logprobs(llm):
    """None for the first token, which nothing predicts."""
    (output,) = llm.generate("abc", SamplingParams(max_tokens=1, prompt_logprobs=2))
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == len(output.prompt_token_ids) - 1
    assert all(token in scored for scored, token in zip(others, output.prompt_token_ids[1:], strict=True))


def test_a_table_or_bytes_are_no_prompts(llm):
    """The names of a table's columns were completed, and the numbers of bytes as token ids."""
    table = pa.table({"prompt": ["a"]})
    with pytest.raises(ValueError, match=r"^prompts must be .* got Table; give one of its columns$"):
        llm.generate(table)
    with pytest.raises(ValueError, match=r"^prompts must be .* got bytes$"):
        llm.generate(b"ab")


def test_chats_in_arrays(llm):
    """As pandas reads them from Parquet: they were no list."""
    chat = [{"role": "user", "content": "Hi"}]
    chats = np.empty(2, dtype=object)
    chats[0], chats[1] = np.array(chat), chat
    one, two = llm.chat(chats, SHORT)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == llm.chat(chat, SHORT)[0].outputs[0].token_ids


def test_no_prompts(llm):
    assert llm.generate([]) == []


def test_closing_gives_the_memory_back():
    """What holds the weights is gone; the model says so if it is used again."""
    llm = LLM(NAME)
    with llm.exclusive() as launched:
        engine = weakref.ref(launched.engine)
    del launched
    llm.close()
    gc.collect()
    assert engine() is None
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    llm.close()


def test_a_slow_reader_does_not_stop_the_stream(llm):
    """Reading ahead ends when nobody takes results, and goes on after that."""
    stream = llm.stream((f"rose {i}" for i in range(30)), SHORT)
    first = next(stream)
    time.sleep(0.05)
    assert len([first, *stream]) == 30


def test_embed(llm):
    """vLLM's names, one vector for each prompt, in order; each as its own parameters say."""
    prompts = ["red roses", [5, 6, 7], {"prompt": "the rose " * 9}]
    outputs = llm.embed(prompts)
    assert [len(output.outputs.embedding) for output in outputs] == [output.outputs.hidden_size for output in outputs]
    assert [len(output.prompt_token_ids) for output in outputs] == [9, 3, 81]
    assert outputs[1].finished and outputs[1].error is None
    for output in outputs:
        assert sum(value**2 for value in output.outputs.embedding) == pytest.approx(1, abs=1e-5)
    params = [PoolingParams(), PoolingParams(dimensions=4, normalize=False), PoolingParams(pooling="mean")]
    others = [output.outputs.embedding for output in llm.embed(prompts, params)]
    assert others[0] == outputs[0].outputs.embedding
    assert len(others[1]) == 4
    assert others[2] != outputs[2].outputs.embedding
    assert llm.embed("red roses")[0].outputs.embedding == others[0]


def test_prompts_that_cannot_be_embedded(llm):
    """One is named by its number, or costs nobody else anything."""
    with pytest.raises(ValueError, match="dimensions must be in"):
        llm.embed("a", PoolingParams(dimensions=33))
    bad, good = llm.embed(["", "a"], on_error="return")
    assert (bad.outputs, bad.error_code) == (None, "empty_prompt")
    assert good.outputs.hidden_size == 32
    with pytest.raises(ValueError, match="pooling_params must be PoolingParams"):
        llm.embed(["a"], [SamplingParams()])


def test_progress_of_a_call(llm, monkeypatch, capsys):
    """One line after the first prompts were finished, and no more: tokens count as they come."""
    monkeypatch.setattr("rosebatch.job.report.progress._PLAIN_SECONDS", 0)
    llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=True)
    told = [line.split(", ") for line in capsys.readouterr().err.splitlines()]
    assert [rows for rows, *_ in told][:5] == ["0/2 rows"] * 5
    assert [int(tokens.split()[0]) for _, tokens, *_ in told][:5] == [2, 4, 6, 8, 10]
    assert all(left.endswith(" left") for *_, left in told)


def test_a_stream_of_one_text(llm):
    """Its letters were prompts."""
    (output,) = llm.stream("abc", SamplingParams(max_tokens=1))
    assert output.prompt == "abc"
    with pytest.raises(ValueError, match=r"^prompts must be a text, "):
        next(llm.stream(None))


def test_a_prompt_whose_tokens_are_all_ruled_out(llm):
    """Its error was that the model's logits are not finite, as if the weights were damaged."""
    (end, *_) = llm.plan.source.config.eos_token_ids
    early = SamplingParams(allowed_token_ids=[end], min_tokens=2, max_tokens=4)
    stops = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2, max_tokens=4)
    fine = SamplingParams(allowed_token_ids=[5], min_tokens=2, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(["a"] * 3, [early, stops, fine], on_error="return")
    assert [output.error_code for output in outputs] == ["invalid_sampling", "invalid_sampling", None]
    told = "all tokens are ruled out by bad_words, allowed_token_ids and min_tokens, for token 1 of the answer"
    assert told in outputs[0].error and told in outputs[1].error
    assert outputs[2].outputs[0].token_ids == [5] * 4


def test_what_belongs_elsewhere(llm, tmp_path):
    """A loaded model was blamed for ``max_tokens``, and parameters of another kind were "not iterable"."""
    with pytest.raises(ValueError, match=r"^max_tokens is a setting of rows: give sampling=\{'max_tokens': …\}$"):
        run_file(tmp_path / "in.jsonl", model=llm, max_tokens=3)
    with pytest.raises(ValueError, match=r"^pooling_params must be PoolingParams, got SamplingParams$"):
        llm.embed("a", SamplingParams())
    with pytest.raises(ValueError, match=r"^prompt 0: expected prompt or .*, got messages; chat takes messages$"):
        llm.generate({"messages": []})


def test_large_prompts_of_a_stream_count_more(llm, monkeypatch):
    """64 of them were read ahead, whatever their size: of 30 MB each, 2 GB."""
    weights = []

    def on_thread(rows, limit, patience, name, weight):
        for row in rows:
            weights.append(weight(row))
            yield row

    monkeypatch.setattr("rosebatch.llm.llm.on_thread", on_thread)
    assert len(list(llm.stream(["a", [7] * 200_000], SHORT, on_error="return"))) == 2
    assert weights == [1, 1 + 32 * 200_000 // 2**20]


def test_an_array_of_a_number_alone_is_no_prompt(llm):
    """It ended the whole call, with a TypeError."""
    good, bad = llm.generate(["a", np.array(3)], SHORT, on_error="return")
    assert (good.error, bad.error_code) == (None, "invalid_prompt")


def test_an_empty_tuple_of_calls_is_none():
    """A template that asks whether a message has calls took it for some."""
    message = {"role": "assistant", "content": "x"}
    for calls in ([], ()):
        assert plain_message({**message, "tool_calls": calls}) == message
