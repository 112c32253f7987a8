"""Scripts of each kind that vLLM's users write, with the import changed alone."""

import re
import sys
import textwrap
from dataclasses import FrozenInstanceError, replace

import pytest

import rosebatch
from rosebatch import LLM, GrammarSpec, SamplingParams, StructuredOutputsParams, TokensPrompt
from rosebatch.llm.vllm_names import own_names
from tests.api.conftest import NAME


def test_structured_outputs(llm):
    """``structured_outputs`` and ``guided_decoding`` were unexpected keyword arguments."""
    given = (
        (StructuredOutputsParams(choice=["Positive", "Negative"]), GrammarSpec("choice", '["Positive","Negative"]')),
        (StructuredOutputsParams(regex="[0-9]{3}"), GrammarSpec("regex", "[0-9]{3}")),
        (StructuredOutputsParams(json={"type": "null"}), GrammarSpec("json_schema", '{"type":"null"}')),
        (StructuredOutputsParams(json='{"const": 5}'), GrammarSpec("json_schema", '{"const": 5}')),
        (StructuredOutputsParams(grammar='start: "a"'), GrammarSpec("lark", 'start: "a"')),
        (StructuredOutputsParams(json_object=True, backend="xgrammar"), GrammarSpec("json_object")),
        ({"regex": "b+"}, GrammarSpec("regex", "b+")),
    )
    for params, spec in given:
        assert SamplingParams(structured_outputs=params).grammar == spec
        assert SamplingParams(guided_decoding=params).grammar == spec
    assert rosebatch.GuidedDecodingParams(regex="a+") == StructuredOutputsParams(regex="a+")
    params = [SamplingParams(structured_outputs=params, max_tokens=12) for params, _ in given[:3]]
    (color, number, nothing) = [output.outputs[0].text for output in llm.generate(["a", "b", "c"], params)]
    assert color in ("Positive", "Negative") and len(number) == 3 and number.isdigit() and nothing == "null"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StructuredOutputsParams(), "give one of json, regex, choice, grammar, json_object; got none"),
        (lambda: StructuredOutputsParams(regex="a", choice=["b"]), "give one of .* got 2"),
        (lambda: StructuredOutputsParams(choice="ab"), "choice must be a list of texts, got 'ab'"),
        (lambda: StructuredOutputsParams(json={}, whitespace_pattern=" "), "whitespace_pattern=' ' is not served"),
        (lambda: SamplingParams(structured_outputs="a"), "structured_outputs must be StructuredOutputsParams, got str"),
        (
            lambda: SamplingParams(guided_decoding={"regex": "a"}, grammar=GrammarSpec("json_object")),
            "one grammar: keep one of grammar, structured_outputs, guided_decoding",
        ),
        (lambda: SamplingParams(best_of=3), "best_of=3 is not served: use n: choices are not ranked"),
        (lambda: SamplingParams(logits_processors=[print]), "logits_processors=.* is not served"),
        (lambda: SamplingParams(extra_args={"a": 1}), "extra_args={'a': 1} is not served"),
    ],
)
def test_parameters_that_are_not_served(make, message):
    """One line with the name of what is not."""
    with pytest.raises(ValueError, match=message) as told:
        make()
    assert "\n" not in str(told.value)


def test_parameters_that_ask_for_nothing(llm):
    """They were unexpected keyword arguments."""
    params = SamplingParams(
        max_tokens=3, best_of=1, detokenize=True, spaces_between_special_tokens=False, logits_processors=None
    )
    assert params.clone() == params == SamplingParams(max_tokens=3)
    (plain,) = llm.generate("a", params)
    (same,) = llm.generate("a", params, use_tqdm=False, lora_request=None, priority=[0])
    chat = [{"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(chat, params, lora_request=None, chat_template=None, chat_template_content_format="auto")
    assert same.outputs[0].text == plain.outputs[0].text and answer.outputs
    assert llm.embed("a", lora_request=None)[0].outputs
    assert plain.lora_request is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lora_request": object()}, ValueError, r"^lora_request must be a LoRARequest, got object$"),
        ({"priority": [1, 2]}, ValueError, r"^priority=\[1, 2\] is not served: give urgent prompts first$"),
        ({"max_tokens": 3}, TypeError, r"^generate\(\): max_tokens is a field of SamplingParams: generate\(…, Sampl"),
        ({"use_tdqm": True}, TypeError, r"^generate\(\) got an unexpected keyword argument 'use_tdqm'$"),
    ],
)
def test_calls_that_are_not_served(llm, given, error, message):
    with pytest.raises(error, match=message):
        llm.generate(["a"] * len(given.get("priority", [0])), **given)


def test_an_adapter_of_an_embedding(llm):
    """The error asked for adapters of LLM, where they may have been given."""
    with pytest.raises(ValueError, match=r"^lora_request=3 is not served: give {'prompt': text, 'lora': name}"):
        llm.embed("a", lora_request=3)


def test_a_grammar_in_ebnf(llm):
    """It said only which character was not expected: vLLM's example has its grammar in EBNF."""
    params = StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "a" | "b"')
    with pytest.raises(ValueError, match=r"Expected token.*; it looks like EBNF \(root ::= …\), but Lark is read"):
        llm.generate("a", SamplingParams(structured_outputs=params))


def test_what_vllm_has_and_we_do_not(llm):
    """Each is refused by its name, in one line that says what serves instead."""
    for name in ("sleep", "wake_up", "llm_engine", "apply_model", "collective_rpc"):
        with pytest.raises(AttributeError, match=f"^LLM has no {name}: [^\n]+$"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^LLM has no encode: use embed, classify or reward; "):
        llm.encode("a")
    with pytest.raises(AttributeError, match=r"^LLM has no frobnicate$"):
        _ = llm.frobnicate
    assert not hasattr(llm, "frobnicate")
    for call in (llm.generate, llm.embed):
        with pytest.raises(TypeError, match=r"prompt_token_ids is not served: give token ids as prompts: generate\("):
            call(prompt_token_ids=[[1, 2]])
        for none in (None, 5):
            with pytest.raises(ValueError, match=f"^prompts must be a text, .* got {type(none).__name__}$"):
                call(none)
    with pytest.raises(ImportError, match=r"^cannot import name 'Frobnicator'"):
        from rosebatch import Frobnicator  # noqa: F401


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("EngineArgs", "use LLM"),
        ("AsyncLLM", "await LLM.*agenerate"),
    ],
)
def test_imports_that_are_not_served(name, instead):
    """The line named nothing that serves instead."""
    with pytest.raises(ImportError, match=f"^rosebatch has no {name}: .*{instead}"):
        exec(f"from rosebatch import {name}")
    assert name not in dir(rosebatch)


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ({"compilation_config": 3}, "use switches, such as cuda_graph=False"),
        ({"speculative_config": {"num_speculative_tokens": 5}}, "use speculative_model= of LLM, with an EAGLE-3 head"),
        ({"override_generation_config": {"temperature": 0.1}}, "use SamplingParams"),
        ({"enable_lora": True}, "use lora={name: folder} of LLM"),
        ({"enable_prompt_embeds": True}, "give token ids as prompts"),
        ({"logprobs_mode": "processed_logprobs"}, "they are of the model's own logits"),
        ({"logits_processors": [print]}, "use logit_bias, bad_words or allowed_token_ids"),
        ({"rope_theta": 1e6}, "change config.json in a copy of the model"),
        ({"download_dir": "/models"}, "set HF_HOME"),
    ],
)
def test_settings_that_are_not_served(setting, instead):
    """Some were answered with "did you mean generation_config?", and others did not say what serves instead."""
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name}=.* is not served: {re.escape(instead)}$"):
        LLM(NAME, **setting)


def test_settings_that_change_nothing():
    """``swap_space=8`` was refused, where 4, vLLM's default, was not. So was ``calculate_kv_scales``."""
    ignored = {"swap_space": 8, "max_seq_len_to_capture": 8192, "guided_decoding_backend": "xgrammar"}
    ignored["calculate_kv_scales"] = True
    neutral = {"hf_token": None, "speculative_config": None, "logprobs_mode": "raw_logprobs"}
    neutral |= {"structured_outputs_config": {"backend": "xgrammar"}, "logits_processors": []}
    assert own_names(ignored | neutral | {"seed": 1}) == {"seed": 1}
    assert SamplingParams(truncate_prompt_tokens=None) == SamplingParams()
    assert own_names(dict.fromkeys(["enforce_eager", "cpu_offload_gb", "enable_lora", "tokenizer_mode", "ray"])) == {}
    # vLLM's default. It was the working directory, whose files rows could name.
    assert own_names({"allowed_local_media_path": "", "media_root": None}) == {"media_root": None}


def test_default_parameters_are_replaced(llm):
    """vLLM's can be assigned to; ours cannot, and say how to change them."""
    params = llm.get_default_sampling_params()
    with pytest.raises(FrozenInstanceError, match=r"max_tokens: params = dataclasses.replace\(params, max_tokens=3\)$"):
        params.max_tokens = 3
    assert len(llm.generate("a", replace(params, max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_why_a_completion_ended(llm):
    """``stop_reason`` is the stop string or the stop token, and None for the length: it did not exist."""
    (plain,) = llm.generate("roses", SamplingParams(max_tokens=12, ignore_eos=True))
    ids = plain.outputs[0].token_ids
    string = next(each for each in plain.outputs[0].text if plain.outputs[0].text.count(each))
    by_string, by_token, by_length = llm.generate(
        ["roses"] * 3,
        [
            SamplingParams(max_tokens=12, ignore_eos=True, stop=["never", string]),
            SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[ids[2]]),
            SamplingParams(max_tokens=1, ignore_eos=True),
        ],
    )
    told = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in (by_string, by_token)]
    assert told == [("stop", string), ("stop", ids[2])]
    assert by_length.outputs[0].finish_reason == "length" and by_length.outputs[0].stop_reason is None


def test_metrics(llm):
    """They count all completions of a request, and their times are in order."""
    (output,) = llm.generate("a", SamplingParams(max_tokens=4, ignore_eos=True, n=3, temperature=1.0))
    metrics = output.metrics
    assert metrics.num_generation_tokens == 12
    assert metrics.arrival_time < metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time
    assert metrics.first_token_latency == min(each.token_times[0] for each in output.outputs)
    (failed,) = llm.generate([""], on_error="return")
    assert failed.metrics is None


def test_ranks_of_chosen_tokens(llm):
    """A chosen token beyond the likeliest ones had no rank."""
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=8, ignore_eos=True)
    (top,) = llm.generate("abc", replace(params, logprobs=20, prompt_logprobs=20))
    (alone,) = llm.generate("abc", replace(params, logprobs=0, prompt_logprobs=0))
    for many, one in zip(top.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
        ((token, own),) = one.items()
        assert own.rank == many[token].rank
        assert own.rank > 20 or own.rank <= sum(1 for each in many.values() if each.rank <= 20)
    assert any(rank.rank > 20 for scored in alone.outputs[0].logprobs for rank in scored.values())
    for many, one in zip(top.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        ((token, own),) = one.items()
        assert own.rank == many[token].rank >= 1


def test_scoring_a_prompt_alone(llm):
    """``max_tokens=0`` was refused though rows take it."""
    (output,) = llm.generate("abc", SamplingParams(max_tokens=0, prompt_logprobs=1))
    (completion,) = output.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert len(output.prompt_logprobs) == 3
    with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
        SamplingParams(max_tokens=0)


def test_a_seed_of_the_model(folder):
    """Calls sample anew, and a second process that makes the same calls gets the same; other seeds, others."""
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def calls(**seed):
        with LLM(folder, **seed) as llm:
            return [[each.outputs[0].token_ids for each in llm.generate(["a", "a"], sampled)] for _ in range(2)]

    one = calls(seed=1)
    assert one == calls(seed=1) != calls(seed=2)
    assert len({tuple(ids) for call in one for ids in call}) == 4


def test_the_demo_model_says_so(folder, monkeypatch, capsys):
    """``LLM()`` took it silently."""
    monkeypatch.setattr("rosebatch.model.source._demo_model", lambda: folder)
    LLM().close()
    told = "rosebatch: no model given: the demo model answers, which is for trying out\n"
    assert capsys.readouterr().err == told
    LLM(NAME).close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("hi", r'^messages must be a list such as \[{"role": "user", "content": "Hi"}\], got str$'),
        ({"role": "user", "content": "a"}, "messages must be a list .* got dict$"),
        ([[{"role": "user", "content": "a"}], "hi"], "^prompt 1: a chat is a list of messages, got str$"),
        ([[]], "^prompt 0: messages is empty$"),
        ([{"role": "user", "content": "a"}, "b"], r"^prompt 0: Expected `object`, got `str` - at `messages\[1\]`$"),
        ([{"content": "a"}], "^prompt 0: Object missing required field `role`"),
        ([{"role": "user", "content": 5}], "^prompt 0: .*messages.*content"),
    ],
)
def test_what_is_no_chat(llm, chat, message):
    """It said "dictionary update sequence element #0 has length 1", or rendered what it got."""
    with pytest.raises(ValueError, match=message):
        llm.chat(chat, SamplingParams(max_tokens=1))


def test_prompts_of_tokens(llm):
    """``TokensPrompt`` and ``TextPrompt`` are mappings."""
    by_ids, by_text = llm.generate(
        [TokensPrompt(prompt_token_ids=[97, 98]), rosebatch.TextPrompt(prompt="ab")], SamplingParams(max_tokens=3)
    )
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert "vllm" not in sys.modules


SCRIPTS = {
    "basic": """
        from vllm import LLM, SamplingParams

        prompts = ["Hello, my name is", "The capital of France is"]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
        llm = LLM(model=MODEL, trust_remote_code=True, swap_space=4, disable_log_stats=True)
        for output in llm.generate(prompts, sampling_params):
            print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    """,
    "chat": """
        from vllm import LLM

        llm = LLM(model=MODEL, max_model_len=512, gpu_memory_utilization=0.8, tensor_parallel_size=1)
        sampling_params = llm.get_default_sampling_params()
        conversation = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ]
        outputs = llm.chat(messages=[conversation] * 2, sampling_params=sampling_params, use_tqdm=False)
        print([output.outputs[0].text for output in outputs])
    """,
    "structured outputs": """
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        llm = LLM(model=MODEL)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
        assert llm.generate(prompts="vLLM is wonderful!", sampling_params=params)[0].outputs[0].text.endswith("tive")
    """,
    "logprobs": """
        from vllm import LLM, SamplingParams, TokensPrompt

        llm = LLM(MODEL, enforce_eager=True, seed=0)
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=5))
        scores = [d[t].logprob for d, t in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:])]
        assert len(scores) == 2 and all(each.rank for each in output.outputs[0].logprobs[0].values())
    """,
    "embeddings": """
        from vllm import LLM, PoolingParams

        llm = LLM(model=MODEL, runner="pooling", enforce_eager=False)
        for output in llm.embed(["a", "b"], pooling_params=PoolingParams(dimensions=8)):
            assert len(output.outputs.embedding) == 8
    """,
    "n and stop strings": """
        from vllm import LLM, SamplingParams

        llm = LLM(model=MODEL, dtype="float32", enable_prefix_caching=True, max_num_seqs=16)
        params = SamplingParams(n=3, best_of=None, temperature=1.0, stop=["a", "e"], max_tokens=16, logit_bias={5: 1.0})
        (output,) = llm.generate("red", params.clone())
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert all(each.stop_reason in ("a", "e", None) for each in output.outputs)
    """,
    "threads": """
        from concurrent.futures import ThreadPoolExecutor
        from vllm import LLM, SamplingParams

        llm = LLM(model=MODEL)
        with ThreadPoolExecutor(4) as pool:
            params = SamplingParams(max_tokens=4)
            found = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].prompt, ["a", "b", "c", "d"]))
        assert found == ["a", "b", "c", "d"]
    """,
}


@pytest.mark.matrix
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_with_its_import_changed(script):
    """Names that scripts of this kind use and that were missing ended them."""
    changed = re.sub(r"from vllm[a-z_.]* import", "from rosebatch import", textwrap.dedent(script))
    names = {"MODEL": NAME}
    exec(changed, names)
    names["llm"].close()
