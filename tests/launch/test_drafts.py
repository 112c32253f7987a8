"""A head for drafts: refused with a reason where no step would have its drafts, and no part of what decides results."""

import json
from functools import partial

import pytest
import torch

from rosebatch import LLM, SamplingParams, run_file
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.engine.engine import Engine
from rosebatch.launch import plan as launch_plan
from rosebatch.launch.plan import plan_fitting, plan_launch
from tests.helpers.eagle3_heads import HEAD_DIM, HIDDEN, save_head, save_target
from tests.helpers.families import ENCODERS, FAMILIES
from tests.helpers.shared_folder import make_once
from tests.helpers.small_llama import VOCAB as BYTES
from tests.helpers.small_llama import save_tokenizer


@pytest.fixture(scope="module")
def models(shared_folder):
    """Folders of a model with a tokenizer and of a head."""

    def save(folder):
        save_target(folder / "target", vocab_size=BYTES)
        save_tokenizer(folder / "target")
        save_head(folder / "head", vocab_size=BYTES)

    return make_once(shared_folder / "eagle3-launched", save)


def plan(folder, head, **settings):
    return plan_launch(RunConfig(model=str(folder), speculative_model=str(head), **{"device": "cpu"} | settings))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative": "off"}, "--speculative off leaves out all drafts: leave it out or leave the head out$"),
        ({"tensor_parallel_size": 2}, "a head is not divided among ranks"),
        (
            {"model_impl": "transformers"},
            "transformers' code runs this model, and hands out no states of its layers: leave the head out$",
        ),
        (
            {"switches": {"batch_invariant": False}},
            "with --no-batch-invariant, answers would depend on drafts: leave it out or leave the head out$",
        ),
        ({"dtype": "float16"}, "in float16 on this CPU, .*: take --dtype float32 or leave the head out$"),
    ],
)
def test_runs_without_drafts(settings, reason, models):
    """A head that drafts nothing took its memory without a word."""
    with pytest.raises(FlagError, match=f"^--speculative-model: {reason}"):
        plan(models / "target", models / "head", **settings)


def test_a_gpu(models, monkeypatch):
    monkeypatch.setattr(launch_plan, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(launch_plan, "unmeasured_sizes", lambda device: None)
    with pytest.raises(
        FlagError,
        match=r"^--speculative-model: on a GPU, .* no layer of a head yet: take --device cpu or leave the head out$",
    ):
        plan(models / "target", models / "head", device="cuda", dtype="float32")


@pytest.mark.parametrize(
    ("name", "architecture", "reason"),
    [
        ("qwen3_5", "Qwen3_5ForCausalLM", "layers of this model keep states, from which tokens cannot be taken back"),
        ("phi3-longrope", "Phi3ForCausalLM", r"all keys of a row change at a length \(longrope\)"),
        ("bert", "BertModel", "the model generates no tokens"),
    ],
)
def test_models_without_drafts(name, architecture, reason, transformers, tmp_path):
    """Drafts of a delta rule's model are off, and a head for it would be loaded for nothing."""
    kind, values = {**FAMILIES, **ENCODERS}[name]
    config = getattr(transformers, kind)(**values, architectures=[architecture])
    config.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    save_head(tmp_path / "head", **sizes, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    settings = RunConfig(model=str(tmp_path / "model"), speculative_model=str(tmp_path / "head"), device="cpu")
    with pytest.raises(FlagError, match=f"^--speculative-model: {reason}"):
        plan_launch(settings, weights=False)


def test_a_head_is_part_of_what_has_to_fit(models):
    """Its weights and planes were counted once both were loaded."""
    heads = None, str(models / "head")
    configs = [RunConfig(model=str(models / "target"), speculative_model=each, device="cpu") for each in heads]
    plain, drafted = (plan_fitting(each).fit for each in configs)
    assert drafted.wanted.weights("cpu") - plain.wanted.weights("cpu") == 4 * drafted.wanted.draft_weights > 100_000
    # Of two heads, K and V in eight layers; those of the head's layer, and a state.
    own, more = 8 * 2 * 2 * 16, 2 * 2 * HEAD_DIM + HIDDEN
    assert drafted.cache * own == plain.cache * (own + more)


def test_a_run_goes_on_with_a_head(models, tmp_path, monkeypatch):
    """Answers are the same with one, so it is no part of what decides results."""
    lines = [json.dumps({"prompt": f"row {n}", "max_tokens": 20, "temperature": 0.9, "seed": n}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"model": str(models / "target"), "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB"}
    run = partial(run_file, tmp_path / "rows.jsonl", max_num_seqs=4, **settings)
    run(tmp_path / "plain.jsonl")
    step, steps = Engine.step, iter(range(30))

    def stop(engine):
        if next(steps, None) is None:
            raise RuntimeError("stopped")
        return step(engine)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="stopped"):
        patched.setattr(Engine, "step", stop)
        run(tmp_path / "answers.jsonl")
    done = run(tmp_path / "answers.jsonl", resume=True, speculative_model=str(models / "head"))
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    engine = done.report["engine"]
    assert (engine["speculative"], engine["speculative_model"]) == ("auto", str(models / "head"))
    assert done.report["resumed_exactly"] is True and done.report["drafted_tokens"] > 10


def test_a_library_call_with_a_head(models):
    """Stop strings, log-probabilities and several completions are those without it."""
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, n=3, seed=1),
        SamplingParams(max_tokens=30, temperature=1.0, seed=2, stop=["a", "e", "\u0007"]),
        SamplingParams(max_tokens=30, logprobs=2, prompt_logprobs=1),
    ]
    found = []
    for head in (None, str(models / "head")):
        settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "speculative_model": head}
        with LLM(str(models / "target"), **settings) as llm:
            outputs = llm.generate(["begin"] * 3, params)
        found.append([(o.prompt_logprobs, [(c.token_ids, c.text, c.logprobs) for c in o.outputs]) for o in outputs])
    assert found[0] == found[1]
