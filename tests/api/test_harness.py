"""The backend of lm-evaluation-harness beside the harness's own backend ``hf``, in fp32."""

import copy
import json
import math
import tomllib
from importlib import import_module
from itertools import product

import datasets
import lm_eval.__main__
import pytest
import tokenizers
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table, simple_parse_args_string

from rosebatch.core.errors import UserError
from rosebatch.llm.harness import RosebatchLM, main
from tests.helpers.byte_tokenizer import EOS
from tests.helpers.checkout import ROOT
from tests.helpers.small_llama import TEMPLATE, VOCAB, save_llama, save_tokenizer

LONGEST = 64
BOS, BOS_TEXT = 258, "<|assistant|>"
LONG = "Of all flowers, methinks a rose is best. It is the very emblem of a maid. " * 2
PROMPTS = ["The rose is", "Roses are", f"{BOS_TEXT}A tulip is", "A rose", LONG]
FP32 = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module", params=[False, True], ids=["no-bos", "bos"])
def folder(request, tmp_path_factory, transformers):
    """A model of ASCII whose greedy answers follow its own penalty; its tokenizer may begin texts with BOS."""
    folder = tmp_path_factory.mktemp("harness")
    save_llama(folder, max_position_embeddings=LONGEST)
    save_tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[128:256] = 0.0
    model.save_pretrained(folder)
    settings = {"eos_token_id": EOS, "repetition_penalty": 1.3, "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    if request.param:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = tokenizers.processors.TemplateProcessing([BOS_TEXT, "$A"], special_tokens=[(BOS_TEXT, BOS)])
        backend.post_processor = template
        backend.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": BOS_TEXT}))
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return RosebatchLM(str(folder), max_num_seqs=8, **FP32)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(str(folder), **FP32)


def requests(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def assert_alike(found, expected):
    for (logprob, is_greedy), (right, right_is_greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(right, rel=1e-6, abs=1e-4)
        assert is_greedy is right_is_greedy


CONTINUATIONS = [
    ("The rose is", " red"),
    # Their tokens before the last are the same.
    ("The rose is", " rea"),
    ("The rose is", " re"),
    ("The rose is ", "red"),
    ("The rose is \n ", " red "),
    ("", "Roses"),
    ("", "R"),
    ("", "<|end|>Roses"),
    ("", f"{BOS_TEXT}Roses"),
    ("<|end|>The rose", " is"),
    (f"{BOS_TEXT}The rose", " is"),
    # Too long for the model by much, by one, and as long as it allows.
    (LONG, LONG[:9]),
    (LONG[: LONGEST - 3], "12345"),
    (LONG[: LONGEST - 3], "1234"),
    (LONG[: LONGEST - 3], "123"),
]


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_continuations(ours, theirs, monkeypatch, add_bos_token):
    """Spaces, BOS, what stands before a text, and which tokens are left out: one that differs changes all numbers."""
    for lm in (ours, theirs):
        monkeypatch.setattr(lm, "add_bos_token", add_bos_token)
    asked = requests("loglikelihood", *CONTINUATIONS, *CONTINUATIONS[:3])
    found = ours.loglikelihood(asked, disable_tqdm=True)
    assert_alike(found, theirs.loglikelihood(asked, disable_tqdm=True))
    assert found[:3] == found[-3:]


def test_what_greedy_decoding_writes(ours, theirs):
    """``is_greedy`` was never true for the random continuations above."""
    start = theirs.tok_encode("The rose is")
    best = int(theirs.model(torch.tensor([start])).logits[0, -1].argmax())
    asked = [(None, start, [best]), (None, start, [best + 1]), (None, start, [best, 7])]
    found = ours._loglikelihood_tokens(asked, disable_tqdm=True)
    assert_alike(found, theirs._loglikelihood_tokens(asked, disable_tqdm=True))
    assert [is_greedy for _, is_greedy in found] == [True, False, False]


def test_more_continuations_than_a_row_may_have(ours):
    """They all share one pass, and a row of ``score`` has a limit."""
    found = ours._loglikelihood_tokens([(None, [5, 6], [n % VOCAB]) for n in range(1100)], disable_tqdm=True)
    assert found[:800] == found[VOCAB:]
    assert sum(math.exp(logprob) for logprob, _ in found[:VOCAB]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("prefix", [None, 5])
def test_whole_texts(ours, theirs, monkeypatch, prefix):
    """Windows: the first token follows the prefix, and each later window has as much context as there is room for."""
    for lm in (ours, theirs):
        monkeypatch.setattr(lm, "custom_prefix_token_id", prefix)
    texts = ["R", "The rose is red.", LONG[: LONGEST - 1], LONG[:LONGEST], LONG[: LONGEST + 1], LONG, "", LONG]
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))
    found = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-6)


def test_completions(ours, theirs):
    """Greedy ones by the model's own penalty, up to the first of several stop strings.

    A special token is in no text, so that it could be no stop string; others stayed in the text.
    """
    asked = [(prompt, {"until": [], "max_gen_toks": 24}) for prompt in PROMPTS]
    whole = theirs.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    tokens = [
        each.outputs[0].token_ids
        for each in ours.llm.generate(*zip(*(ours._asked(*each) for each in asked), strict=True))
    ]
    special = [token for own in tokens for token in own if token > EOS]
    long = [(prompt, text) for prompt, text in zip(PROMPTS, whole, strict=True) if len(text) > 8]
    assert len(long) >= 3
    for prompt, text in long:
        asked += [
            (prompt, {"until": [text[6:8], text[4:7]], "max_gen_toks": 24}),
            (prompt, {"until": text[3], "do_sample": False, "temperature": 0.7, "max_tokens": 24}),
            (prompt, {"until": ["never", f"<|unused {special[0] - 259}|>"], "max_new_tokens": 40, "num_beams": 1}),
        ]
    found = ours.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert found == theirs.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert len(set(map(len, found))) > 4


def test_sampling(ours):
    """A temperature alone samples. Fields of ``SamplingParams`` are taken, and others refused by their name."""
    prompt, params = ours._asked("The rose is", {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_gen_toks": 9})
    assert prompt == ours.tok_encode("The rose is")
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.8, 0.9, 3, 9)
    assert (params.repetition_penalty, params.stop) == (1.3, ("<|end|>",))
    params = ours._asked("a", {"do_sample": True, "temperature": 0.5, "until": ["b"], "max_gen_toks": 9})[1]
    assert (params.temperature, params.stop) == (0.5, ("b", "<|end|>"))
    with pytest.raises(ValueError, match=r"^generation_kwargs: .* 'num_beams'$"):
        ours._asked("a", {"num_beams": 4, "max_gen_toks": 9})
    with pytest.raises(ValueError, match=r"^max_gen_toks 64 leave no room for a prompt: max_length is 64$"):
        ours._asked("a", {"max_gen_toks": LONGEST})
    assert len(ours.generate_until(requests("generate_until", ("", {"max_gen_toks": 2})), disable_tqdm=True)) == 1


@pytest.mark.parametrize("end", [ord("d"), "d", 299, "cd"])
def test_reasoning(ours, theirs, monkeypatch, end):
    """Only what comes after it is the answer, and stop strings before it do not count."""
    token_ids = [*b"b d cd\n e b", EOS]
    for lm in (ours, theirs):
        monkeypatch.setattr(lm, "think_end_token", end)
    monkeypatch.setattr(
        theirs, "_model_generate", lambda context, **_: torch.tensor([[*context[0].tolist(), *token_ids]])
    )
    right = theirs.generate_until(
        requests("generate_until", ("a", {"until": ["b"], "max_gen_toks": 9})), disable_tqdm=True
    )
    assert [ours._answer(token_ids, ("b", "<|end|>"))] == right


def test_chats(ours, theirs, monkeypatch):
    """Rendered by the tokenizer's template, with variables of its own, and without system messages that it refuses."""
    for lm in (ours, theirs):
        template = TEMPLATE + "{{ mood }}{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        monkeypatch.setattr(lm.tokenizer, "chat_template", template)
        monkeypatch.setattr(lm, "chat_template_args", {"mood": "calm"})
    chat = [{"role": role, "content": f"a {role}"} for role in ("system", "user", "assistant")]
    for messages, opens in product((chat[1:2], chat[:2], chat[1:], chat), (True, False)):
        assert ours.apply_chat_template(messages, opens) == theirs.apply_chat_template(messages, opens)
    assert "calm" in ours.apply_chat_template(chat)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


class Hook:
    """Keeps what the harness's cache would."""

    def __init__(self):
        self.kept = []

    def add_partial(self, *entry):
        self.kept.append(entry)


def test_what_is_kept_for_the_cache(ours, theirs, monkeypatch):
    """A later run looks for results by the arguments of its requests."""
    kept = {}
    for lm in (ours, theirs):
        monkeypatch.setattr(lm, "cache_hook", hook := Hook())
        lm.loglikelihood(requests("loglikelihood", *CONTINUATIONS[:3]), disable_tqdm=True)
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("Roses",), (LONG,)), disable_tqdm=True)
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 3})), disable_tqdm=True)
        kept[lm] = sorted((kind, arguments) for kind, arguments, _ in hook.kept)
    assert kept[ours] == kept[theirs]
    assert len(kept[ours]) == 6


def test_arguments_of_the_command(folder):
    """They come as texts, with those of other flags; what no backend of ours knows is refused by its name."""
    given = f"pretrained={folder},dtype=float32,max_length=32,prefix_cache=False,enable_thinking=True,max_num_seqs=4"
    also = {"batch_size": "auto", "max_batch_size": None, "device": "cpu"}
    lm = RosebatchLM.create_from_arg_string(given, also)
    assert (lm.max_length, lm.llm.plan.config.max_model_len, lm.chat_template_args) == (
        32,
        32,
        {"enable_thinking": True},
    )
    assert not lm.llm.plan.switches.prefix_cache
    assert RosebatchLM(lm.llm, max_gen_toks=7).max_gen_toks == 7
    with pytest.raises(ValueError, match=r"^unknown setting parallelize"):
        RosebatchLM.create_from_arg_string(f"{given},parallelize=True", also)
    with pytest.raises(ValueError, match=r"^data_parallel_size needs max_length"):
        RosebatchLM(str(folder), data_parallel_size=2)
    assert get_model("rosebatch") is RosebatchLM


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_tokenizer_that_is_told_of_bos(folder, ours, add_bos_token):
    """It is loaded again with that option, as ``hf`` does."""
    found, right = (
        RosebatchLM(ours.llm, add_bos_token=add_bos_token),
        HFLM(str(folder), add_bos_token=add_bos_token, **FP32),
    )
    for text in ("The rose", f"{BOS_TEXT}The rose", "<|end|>a"):
        assert found.tok_encode(text) == right.tok_encode(text)


def test_a_tokenizer_without_an_end(ours, monkeypatch):
    """Prompts need none; what stands before a text has to be given."""
    monkeypatch.setattr(ours, "tokenizer", copy.deepcopy(ours.tokenizer))
    ours.tokenizer.bos_token = ours.tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no BOS and no EOS token: give prefix_token_id"):
        ours.loglikelihood(requests("loglikelihood", ("", "a")), disable_tqdm=True)
    monkeypatch.setattr(ours, "custom_prefix_token_id", 3)
    assert ours._asked("a", {"until": "b", "max_gen_toks": 9})[1].stop == ("b",)


def test_the_name_that_the_package_declares():
    """The harness finds the backend by it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    module, _, name = scripts["rosebatch"].partition(":")
    assert getattr(import_module(module), name) is RosebatchLM


def evaluated(lm, **options):
    """The table that the harness prints for the tasks of the examples, the perplexity, and what the model answered."""
    tasks = TaskManager(include_path=str(ROOT / "examples" / "harness"), include_defaults=False)
    names = ["capitals", "texts", "sums"]
    done = simple_evaluate(lm, tasks=names, task_manager=tasks, num_fewshot=2, bootstrap_iters=0, **options)
    answers = {name: [each["filtered_resps"] for each in samples] for name, samples in done["samples"].items()}
    # Of a random model it has six digits before the last that is printed, more than fp32 is sure of.
    perplexity = done["results"]["texts"].pop("byte_perplexity,none")
    return make_table(done), perplexity, answers


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"apply_chat_template": True}], ids=["texts", "chats"])
@pytest.mark.filterwarnings("ignore:The distutils package:DeprecationWarning")
def test_whole_evaluations(ours, theirs, monkeypatch, tmp_path, options):
    """Multiple choice, perplexity and generation: the same to the last digit that is printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    (found, perplexity, answers), (right, expected, texts) = evaluated(ours, **options), evaluated(theirs, **options)
    assert found == right
    assert perplexity == pytest.approx(expected, rel=1e-5)
    assert answers["sums"] == texts["sums"]
    assert "bits_per_byte" in found and "exact_match" in found and "acc_norm" in found


def test_a_cached_evaluation_asks_nothing(ours, monkeypatch, tmp_path):
    """``--use_cache``: results of an earlier run are taken."""
    kinds = {
        "loglikelihood": CONTINUATIONS[:3],
        "loglikelihood_rolling": [("Roses are red",)],
        "generate_until": [("The rose is", {"max_gen_toks": 5})],
    }

    def answers():
        lm = CachingLM(ours, str(tmp_path / "cache.db"))
        return [getattr(lm, kind)(requests(kind, *arguments)) for kind, arguments in kinds.items()]

    first = answers()
    monkeypatch.setattr(ours, "llm", None)
    assert answers() == first


def test_the_device_of_the_command(folder):
    """The harness asks for cuda:0 where nobody does: without a GPU, its command ended there."""
    lm = RosebatchLM(str(folder), device="cuda:0", dtype="float32", max_num_seqs=8)
    assert lm.llm.plan.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    lm.llm.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("pretrained=/no/such", "/no/such: no such model; give a model folder"),
        ("dtype=float17", "dtype must be one of auto, float32, float16, bfloat16, got 'float17'"),
        ("nonsense=3", "unknown setting nonsense"),
        ("max_length=long", "max_length must be of type int, got 'long'"),
        ("add_bos_token=maybe", "add_bos_token must be of type bool, got 'maybe'"),
        ("device=xyz", "device must be one of auto, cpu, cuda, got 'xyz'"),
        ("max_model_len=999999999", "--max-model-len 999999999 must be between"),
        (f"pretrained={ROOT}/configs/models/llama-3.3-70b.toml,load_format=dummy,max_model_len=64", "does not fit"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, given, told):
    """Tracebacks of forty lines, with the code 1 of a failed run."""

    def evaluate():
        # As the harness does it, which looks through all of its tasks before.
        get_model("rosebatch").create_from_arg_obj(simple_parse_args_string(given), {"device": "cuda:0"})

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = (each for each in capsys.readouterr().err.splitlines() if each.startswith("rosebatch: error: "))
    assert told in line


def test_values_that_the_harness_cannot_read(ours):
    """They were told by a traceback of the harness's own."""
    with pytest.raises(UserError, match=r"^generation_kwargs: .*'many'"):
        ours._asked("a", {"max_gen_toks": "many"})
