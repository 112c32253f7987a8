"""--lora given several times: each row is answered with the adapter that it names."""

import json
from itertools import count

import pytest
import torch
from safetensors.torch import load_file

from rosebatch import LLM, LoRARequest, SamplingParams
from rosebatch.core.errors import UserError
from rosebatch.engine.engine import Engine
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import write_lines
from tests.model.adapters.written import numbers, pair, write_adapter

NAMES = ["one", "two", "three"]
# A prompt of several blocks, with which all rows begin; some are chunks of several steps.
TEXT = "The rose is a rose is a rose. " * 3
PROMPTS = [TEXT, TEXT + "A", "Hello", TEXT[:40]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder):
    """Adapters of other modules and ranks; the last has the names of the first and other numbers."""
    shapes = {
        name.removesuffix(".weight"): tuple(each.shape)
        for name, each in load_file(model_folder / "model.safetensors").items()
        if "proj" in name
    }
    found = {}
    for rank, (name, ends) in enumerate(zip(NAMES, ["proj", ("q_proj", "down_proj"), "proj"], strict=True), 2):
        tensors = {}
        for module, (out, width) in shapes.items():
            if module.endswith(ends):
                tensors[f"{module}.lora_A.weight"] = numbers(f"{name} {module} a", rank, width)
                tensors[f"{module}.lora_B.weight"] = numbers(f"{name} {module} b", out, rank)
        found[name] = write_adapter(tmp_path_factory.mktemp(name), tensors, r=rank, lora_alpha=1.0)
    return found


@pytest.fixture(scope="module")
def flags(folders):
    """Of all adapters."""
    return [part for name, folder in folders.items() for part in ("--lora", f"{name}={folder}")]


@pytest.fixture(scope="module")
def lines():
    """Every prompt with every adapter and without one, one after the other."""
    return [
        {"prompt": text, "max_tokens": 12, "id": f"{place} {name}", **({"lora": name} if name else {})}
        for place, text in enumerate(PROMPTS)
        for name in (*NAMES, None)
    ]


@pytest.fixture(scope="module")
def merged(folders, lines, model_folder):
    """The answer to each of the lines by a model with its adapter merged, by id."""
    found = {}
    for name in (*NAMES, None):
        own = [line for line in lines if line.get("lora") == name]
        lora = {name: folders[name]} if name else None
        with LLM(model_folder, dtype="float32", device="cpu", lora=lora) as llm:
            outputs = llm.generate([line["prompt"] for line in own], SamplingParams(max_tokens=12))
        found |= {line["id"]: output.outputs[0] for line, output in zip(own, outputs, strict=True)}
    return found


@pytest.fixture(scope="module")
def expected(merged):
    """Their texts."""
    found = {key: output.text for key, output in merged.items()}
    assert len(set(found.values())) > 12
    return found


def texts(result):
    """Answers by id."""
    assert (result.code, result.err) == (0, "")
    return {row["id"]: row["text"] for row in result.rows}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-tp", 2],
        ["-dp", 2],
        ["--max-num-seqs", 3, "--max-num-batched-tokens", 16],
        ["--no-prefix-cache", "--no-trim-last-layer"],
        ["--max-loras", 1],
        ["--max-loras", 2, "--max-num-seqs", 3, "-tp", 2],
        pytest.param(["--no-batch-invariant"], marks=pytest.mark.thorough),
    ],
)
def test_rows_of_all_adapters_in_one_batch(generate, flags, lines, expected, options):
    """Each answer is that of a model with its adapter alone: no prompt has the keys of another adapter's."""
    assert texts(generate(lines, *flags, *options)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("most", [None, 1, 2])
def test_preempted_rows_and_several_answers(folders, lines, merged, model_folder, most):
    """A sequence is computed again with its adapter, and forks have their first one's."""
    limits = {"block_size": 16, "kv_cache_memory": 18 * 16 * 2 * 2 * 2 * 8 * 4, "max_num_batched_tokens": 40}
    with LLM(model_folder, dtype="float32", device="cpu", lora=folders, max_loras=most, **limits) as llm:
        prompts = [{"prompt": line["prompt"], "lora": line.get("lora")} for line in lines]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=60, n=2))
        with llm.exclusive() as launched:
            stats = launched.engine.stats
    assert stats.preemptions > 0
    for line, output in zip(lines, outputs, strict=True):
        first, second = (each.token_ids for each in output.outputs)
        assert first[:12] == merged[line["id"]].token_ids
        assert second == first


def test_equal_contents_share_keys_and_equal_prompts_do_not(folders, model_folder):
    """Blocks are found by the adapter's contents, whatever it is called."""
    lora = {"a": folders["one"], "again": folders["one"], "b": folders["three"]}
    with LLM(model_folder, dtype="float32", device="cpu", lora=lora) as llm:
        cached = [
            llm.generate({"prompt": TEXT, "lora": name}, SamplingParams(max_tokens=1))[0].num_cached_tokens
            for name in ("a", "again", "b", None, None)
        ]
    assert [count > 0 for count in cached] == [False, True, False, False, True]


def test_rows_that_name_what_there_is_not(generate, flags, folders):
    """The model alone answered."""
    lines = [{"prompt": "a", "lora": "four"}, {"prompt": "a", "lora": 4}, {"prompt": "a", "lora": None}]
    result = generate(lines, *flags)
    assert result.code == 3
    errors = [row.get("error") and row["error"]["message"] for row in result.rows]
    assert errors[0] == "line 1: lora 'four' is no adapter of this run: --lora names one, two, three"
    assert "Expected `str | null`, got `int` - at `lora`" in errors[1]
    assert errors[2] is None
    one = ["--lora", f"one={folders['one']}"]
    # All rows have the only one, and may say so.
    bad, good = generate([{"prompt": "a", "lora": "two"}, {"prompt": "a", "lora": "one"}], *one).rows
    assert "lora 'two' is no adapter of this run: --lora names one" in bad["error"]["message"]
    (plain,) = generate([{"prompt": "a"}], *one).rows
    assert good["text"] == plain["text"]
    (none,) = generate([{"prompt": "a", "lora": "one"}]).rows
    assert "lora 'one' is no adapter of this run: give --lora NAME=FOLDER" in none["error"]["message"]


def test_requests_of_a_batch(cli, flags, folders, expected, model_folder, tmp_path):
    """The model of a request names an adapter, as other servers have it; with one adapter, it says nothing as ever."""
    models = {"one": "one", "base": "roses", "path": str(model_folder), "none": None, "other": "gpt"}
    bodies = [
        {"custom_id": key, "url": "/v1/completions", "body": {"prompt": TEXT, "max_tokens": 12, "temperature": 0}}
        for key in models
    ]
    for line in bodies:
        line["body"] |= {"model": models[line["custom_id"]]} if models[line["custom_id"]] else {}
    source = write_lines(tmp_path / "in.jsonl", bodies)
    options = ["--model", model_folder, "--served-model-name", "roses", "--quiet"]

    def answers(*given):
        target = tmp_path / "out.jsonl"
        result = cli("generate", source, "-o", target, *options, *given)
        found = {
            line["custom_id"]: line["response"]["body"]
            for file in (target, tmp_path / "out.errors.jsonl")
            if file.exists()
            for line in map(json.loads, file.read_text().splitlines())
        }
        assert result.code in (0, 3)
        return {
            key: body["error"]["message"] if "error" in body else (body["model"], body["choices"][0]["text"])
            for key, body in found.items()
        }

    found = answers(*flags)
    assert "model 'gpt' is neither the model, roses, nor an adapter: one, two, three; --served-model-name" in found.pop(
        "other"
    )
    one, plain = ("one", expected["0 one"]), ("roses", expected["0 None"])
    assert found == {key: one if key == "one" else plain for key in models if key != "other"}
    # The only one is merged into the model, whose name stays.
    assert answers("--lora", f"one={folders['one']}") == dict.fromkeys(models, ("roses", expected["0 one"]))


def test_a_report_and_a_check(cli, flags, lines, model_folder, tmp_path):
    """How many rows had which, and what the memory plan has."""
    source, report = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "report.json"
    options = ["--model", model_folder, *flags]
    result = cli("generate", source, "-o", tmp_path / "out.jsonl", "--report", report, *options)
    found = json.loads(report.read_text())
    assert found["adapters"] == dict.fromkeys(NAMES, len(PROMPTS))
    assert found["engine"]["lora"] == "one, three, two"
    (model,) = [line for line in result.err.splitlines() if line.startswith("adapters: ")]
    assert model == "adapters: one (4), three (4), two (4)"
    checked = cli("check", source, *options)
    assert checked.code == 0 and "cpu, with one, three, two by --lora" in checked.err + checked.out
    assert "at a time" not in checked.err + checked.out + result.err


def test_a_report_and_a_check_of_slots(cli, flags, lines, model_folder, tmp_path):
    """How many adapters were there at a time, and how often one was brought."""
    source, report = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "report.json"
    options = ["--model", model_folder, *flags, "--max-loras", 2]
    result = cli("generate", source, "-o", tmp_path / "out.jsonl", "--report", report, *options)
    found = json.loads(report.read_text())
    assert (found["engine"]["max_loras"], found["adapter_loads"]) == (2, 3)
    assert "adapters: one (4), three (4), two (4); 2 at a time, 3 loads" in result.err
    checked = cli("check", source, *options)
    assert checked.code == 0 and "with 2 of 3 adapters at a time" in checked.err + checked.out


@pytest.mark.parametrize("given", [[], ["--max-loras", 1]], ids=str)
def test_a_resumed_run(generate, flags, folders, lines, expected, tmp_path, monkeypatch, given):
    """Rows of a run that broke off stay; one with other contents by the same name is another model's."""
    target, steps, step = tmp_path / "out.jsonl", count(), Engine.step

    def step_or_end(self):
        if next(steps) == 20:
            raise UserError("broken off")
        return step(self)

    options = ["-o", target, *flags, "--max-num-seqs", 4, *given]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step_or_end)
        assert "broken off" in generate(lines, *options).err
    part = target.with_name("out.jsonl.part")
    assert 1 < part.read_bytes().count(b"\n") < len(lines)
    config = folders["two"] / "adapter_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "lora_alpha": 5}))
    require_error(generate(lines, *options, "--resume"), 2, "the content of the model differs")
    config.write_text(before)
    renamed = [each.replace("two=", "2=") for each in flags]
    require_error(
        generate(lines, "-o", target, *renamed, "--resume"), 2, "--lora was one, three, two, is 2, one, three"
    )
    # The order of the flags says nothing.
    pairs = list(zip(flags[::2], flags[1::2], strict=True))[::-1]
    turned = [part for pair_of in pairs for part in pair_of]
    assert generate(lines, "-o", target, *turned, "--resume").code == 0
    assert {row["id"]: row["text"] for row in map(json.loads, target.read_text().splitlines())} == expected


def test_other_tasks(cli, flags, folders, model_folder, tmp_path):
    """Vectors are those of the row's adapter, too."""

    def vectors(lines, *given):
        source = write_lines(tmp_path / "in.jsonl", lines)
        result = cli("embed", source, "--model", model_folder, "--quiet", *given)
        assert result.code == 0, result.err
        return [json.loads(line)["embedding"] for line in result.out.splitlines()]

    (alone,) = vectors([{"prompt": TEXT}])
    (merged,) = vectors([{"prompt": TEXT}], "--lora", f"one={folders['one']}")
    found = vectors([{"prompt": TEXT, "lora": "one"}, {"prompt": TEXT}], *flags)
    torch.testing.assert_close(torch.tensor(found), torch.tensor([merged, alone]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(torch.tensor(alone), torch.tensor(merged), atol=0.01)


def test_the_library(folders, expected, model_folder):
    """A name in a prompt's mapping, or vLLM's form, by name or by folder, for all or one for each."""
    params = SamplingParams(max_tokens=12)
    vllm = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    with LLM(model_folder, dtype="float32", device="cpu", lora=folders, **vllm) as llm:

        def answers(prompts, given):
            return [each.outputs[0].text for each in llm.generate(prompts, params, lora_request=given)]

        one, two, base = (expected[f"0 {name}"] for name in ("one", "two", None))
        by_path = LoRARequest("other name", 7, str(folders["two"]))
        assert answers(TEXT, LoRARequest("one", 1, str(folders["one"]))) == [one]
        assert answers([TEXT] * 4, [LoRARequest("one", 1), None, by_path, "two"]) == [one, base, two, two]
        assert answers([{"prompt": TEXT, "lora": "two"}, TEXT], "one") == [two, one]
        assert answers(TEXT, None) == [base]
        with pytest.raises(ValueError, match=r"^lora_request four: adapters are loaded with the model: LLM\(…, lora="):
            answers(TEXT, LoRARequest("four", 4, "nowhere"))
        with pytest.raises(ValueError, match=r"^lora_request one: lora={\.\.\.} of LLM has .* by this name, not "):
            answers(TEXT, LoRARequest("one", 1, str(folders["two"])))
        # The loaded one answered, though another of the Hub was asked for.
        with pytest.raises(ValueError, match=r"of LLM has .* by this name, not some/other$"):
            answers(TEXT, LoRARequest("one", 1, "some/other"))
        with pytest.raises(ValueError, match=r"^lora_request must be a LoRARequest, got int$"):
            answers(TEXT, 3)
        with pytest.raises(ValueError, match=r"^lora_request has 1 adapter for 2 prompts$"):
            answers([TEXT, TEXT], ["one"])
        with pytest.raises(ValueError, match="lora 'four' is no adapter of this run"):
            llm.generate({"prompt": TEXT, "lora": "four"}, params)


def test_a_name_that_would_be_cut(model_folder):
    """What stood behind the = was taken for the folder's beginning."""
    with pytest.raises(ValueError, match=r"^lora: the name 'a=b' must have no ="):
        LLM(model_folder, device="cpu", lora={"a=b": "folder"})


def test_two_of_one_name(cli, folders, model_folder, tmp_path):
    """The second would take the place of the first."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    given = ["--lora", f"one={folders['one']}", "--lora", f"one={folders['two']}"]
    result = cli("generate", source, "--model", model_folder, "--quiet", *given)
    require_error(result, 2, "--lora must give each adapter a name of its own, 'one' is there twice")


@pytest.mark.parametrize("named", ["folder", "path", "served"])
def test_an_adapter_with_the_models_name(cli, folders, model_folder, tmp_path, named):
    """Requests that named the adapter were answered by the model alone, without a word. A single one is no choice."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    name = {"folder": model_folder.name, "path": str(model_folder), "served": "roses"}[named]
    options = ["--model", model_folder, *(["--served-model-name", "roses"] if named == "served" else [])]
    given = ["--lora", f"{name}={folders['one']}"]
    assert cli("check", source, *options, *given).code == 0
    result = cli("check", source, *options, *given, "--lora", f"two={folders['two']}")
    require_error(result, 2, f"--lora {name}: the model has this name, too: give the adapter another one")


def test_what_only_one_adapter_may_have(cli, folders, model_folder, tmp_path):
    """Check says so, before anything is loaded."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    head = write_adapter(tmp_path / "head", pair("lm_head", 300, 32)[0])
    given = ["--model", model_folder, "--lora", f"head={head}"]
    assert cli("check", source, *given).code == 0
    result = cli("check", source, *given, "--lora", f"one={folders['one']}")
    require_error(result, 2, "an adapter of the embedding or the head")
