"""Pairs of texts scored by cross-encoders: rows, the library, and what transformers gives."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from rosebatch import LLM, run_file
from rosebatch.core.errors import UserError
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghij"]
TOLERANCE = 1e-5
PAIRS = [("a b", "c d e"), ("a b", "f"), ("a b", "a b c d e f g h i j a b c d e f"), ("g h i", "j")]
ROWS = [
    {"id": "one", "text_1": "a b", "text_2": [second for _, second in PAIRS[:3]]},
    {"text_1": "g h i", "text_2": "j", "gold": 1},
    {"text_1": ["a b", "g h i"], "text_2": ["f", "j"]},
]
BAD = [
    {"text_1": "a"},
    {"text_2": ["a"]},
    {"text_1": "a", "text_2": []},
    {"text_1": ["a", "b"], "text_2": ["c"]},
    {"text_1": "a", "text_2": "b", "prompt": "c"},
    {"text_1": "a " * 90, "text_2": "b"},
    {"prompt": "a", "continuations": ["b"]},
]
CODES = ["missing_prompt"] * 2 + ["invalid_field"] * 2 + ["missing_prompt", "prompt_too_long", "embeds_only"]


@pytest.fixture(scope="session", params=["bert", "xlm-roberta"])
def encoder(request, tmp_path_factory):
    """The folder of a cross-encoder, the model, and its tokenizer: BERT tells the second text by a type."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {"id2label": {0: "fits"}, "label2id": {"fits": 0}, "max_position_embeddings": 66, "pad_token_id": 0}
    options = {**sizes, **names, "vocab_size": len(WORDS), "initializer_range": 0.3}
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if request.param == "bert":
        model = BertForSequenceClassification(BertConfig(**options)).eval()
        backend.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    else:
        model = XLMRobertaForSequenceClassification(XLMRobertaConfig(**options, type_vocab_size=1)).eval()
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=False)
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if request.param == "bert" else [])]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", model_input_names=inputs)
    return folder, model, tokenizer


def right(encoder, pairs, **options):
    _, model, tokenizer = encoder
    found = []
    for pair in pairs:
        with torch.inference_mode():
            found.append(model(**tokenizer(*pair, return_tensors="pt", **options)).logits[0, 0].sigmoid().item())
    return found


def test_scores_are_those_of_transformers(cli, encoder, tmp_path):
    """A second text of the first type, or one without the mark between them, is another score."""
    source, target = write_lines(tmp_path / "in.jsonl", [*ROWS, *BAD]), tmp_path / "out.jsonl"
    assert cli("score", source, "-o", target, "--model", encoder[0], "--dtype", "float32").code == 3
    rows = read_lines(target)
    assert codes(rows) == [None] * len(ROWS) + CODES
    expected = [right(encoder, PAIRS[:3]), right(encoder, PAIRS[3:]), right(encoder, [PAIRS[1], PAIRS[3]])]
    for row, wanted in zip(rows, expected, strict=False):
        assert row["relevance"] == pytest.approx(wanted, abs=TOLERANCE)
    assert (rows[0]["id"], rows[1]["gold"]) == ("one", 1)
    assert len({round(score, 4) for scores in expected[:2] for score in scores}) == 4, "scores differ"


@pytest.mark.matrix
def test_long_pairs_are_cut_as_transformers_cuts(cli, encoder, tmp_path):
    """The end of the longer text goes first; the marks of the texts stay."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [" ".join("abcdefghij"[: 1 + i % 10]) for i in range(0, 60, 7)]
    pairs = [(one, two) for one in texts for two in texts]
    for longest in (5, 8, 11, 14):
        write_lines(source, [{"text_1": a, "text_2": b, "truncate_prompt_tokens": longest} for a, b in pairs])
        assert cli("score", source, "-o", target, "--model", encoder[0], "--dtype", "float32").code == 0
        expected = right(encoder, pairs, truncation="longest_first", max_length=longest)
        assert [row["relevance"][0] for row in read_lines(target)] == pytest.approx(expected, abs=TOLERANCE)


def test_texts_as_long_as_the_model_takes(cli, encoder, tmp_path):
    """-1, as rerankers of vLLM are asked: each was an error row."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    longest, long = (65 if encoder[1].config.model_type == "xlm-roberta" else 66), "a b c d e f g h i j " * 9
    write_lines(source, [{"text_1": "c d", "text_2": long, "truncate_prompt_tokens": -1}])
    assert cli("score", source, "-o", target, "--model", encoder[0], "--dtype", "float32").code == 0
    (row,) = read_lines(target)
    assert row["usage"]["prompt_tokens"] == longest
    expected = right(encoder, [("c d", long)], truncation="longest_first", max_length=longest)
    assert row["relevance"] == pytest.approx(expected, abs=TOLERANCE)
    write_lines(source, [{"prompt": long, "truncate_prompt_tokens": -1}])
    assert cli("embed", source, "-o", target, "--model", encoder[0]).code == 0
    assert read_lines(target)[0]["usage"]["prompt_tokens"] == longest


def test_the_library(encoder):
    """As vLLM's users type it: a text with several, or as many of both."""
    with LLM(encoder[0], dtype="float32") as llm:
        firsts, seconds = zip(*PAIRS, strict=True)
        outputs = llm.score(list(firsts), list(seconds))
        assert [output.outputs.score for output in outputs] == pytest.approx(right(encoder, PAIRS), abs=TOLERANCE)
        several = llm.score("a b", [second for _, second in PAIRS[:3]])
        assert [output.outputs for output in several] == [output.outputs for output in outputs[:3]]
        assert llm.score("g h i", "j")[0].outputs == outputs[3].outputs
        # A row of a file may have 1,024 pairs; a call had no more either.
        assert [output.outputs for output in llm.score("g h i", ["j"] * 1025)] == [outputs[3].outputs] * 1025
        for first, second, told in (
            ("a", None, "scores pairs"),
            (["a", "b"], ["c"], "has 2 texts"),
            ([[1]], ["a"], "pairs"),
        ):
            with pytest.raises(ValueError, match=told):
                llm.score(first, second)


def test_a_model_of_text_scores_no_pairs(cli, model_folder, tmp_path):
    """It has no head for them: each is an error row. A check and --strict said that all could be served."""
    source, target = write_lines(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    assert cli("score", source, "-o", target, "--model", model_folder).code == 3
    assert codes(read_lines(target)) == ["unsupported_pooling"]
    checked = cli("check", source, "--score", "--model", model_folder)
    assert (checked.code, "rows: 0 can be served, 1 cannot" in checked.out) == (3, True)
    result = cli("score", source, "-o", target, "--model", model_folder, "--strict")
    assert (result.code, "1 row cannot be served, and --strict was given" in result.err) == (2, True)


def test_rows_of_another_kind(cli, encoder, tmp_path):
    """A cross-encoder told rows with continuations that it could embed; other commands had no use for pairs."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "continuations": ["b"]}, {"query": "a"}])
    assert cli("score", source, "-o", tmp_path / "out.jsonl", "--model", encoder[0]).code == 3
    (message, other) = (row["error"]["message"] for row in read_lines(tmp_path / "out.jsonl"))
    assert message == "line 1: the model has no output projection: it scores pairs alone, text_1 and text_2"
    assert other.startswith("line 2: expected one of prompt, messages, prompt_token_ids, text_1, text_2; got none")
    pairs = write_lines(tmp_path / "pairs.jsonl", ROWS)
    told = "text_1 and text_2 are a pair: use rosebatch score or classify"
    for command in ("embed", "generate"):
        require_error(cli(command, pairs, "--model", encoder[0]), 2, told)


def test_pairs_of_csv(cli, encoder, tmp_path):
    """A list was scored as one text, with its brackets."""
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text('text_1,text_2\na b,"[""c d e"", ""f""]"\na b,f\n')
    assert cli("score", source, "-o", target, "--model", encoder[0], "--dtype", "float32", "--columns", "").code == 0
    several, one = (row["relevance"] for row in read_lines(target))
    assert several == pytest.approx(right(encoder, PAIRS[:2]), abs=TOLERANCE)
    assert one == several[1:]


def test_batch_lines(cli, encoder, tmp_path):
    """Without the activation, scores are the head's own numbers: an error said that the field was unknown."""
    texts = [second for _, second in PAIRS[:3]]
    bodies = {
        "/score": {"queries": "a b", "documents": texts, "use_activation": False},
        "/v2/rerank": {"query": "a b", "documents": texts},
    }
    lines = [{"custom_id": url, "url": url, "body": body} for url, body in bodies.items()]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli("score", source, "-o", target, "--model", encoder[0], "--dtype", "float32").code == 0
    scores, ranks = (line["response"]["body"] for line in read_lines(target))
    expected = right(encoder, PAIRS[:3])
    found = torch.tensor([each["score"] for each in scores["data"]], dtype=torch.float64)
    assert found.sigmoid().tolist() == pytest.approx(expected, abs=TOLERANCE)
    assert [each["relevance_score"] for each in ranks["results"]] == pytest.approx(
        sorted(expected)[::-1], abs=TOLERANCE
    )


def test_no_flags_of_prompts(cli, encoder, tmp_path):
    """Each row was refused by itself, or its system message was left out in silence."""
    source = write_lines(tmp_path / "in.jsonl", [{"query": "a", **row} for row in ROWS])
    told = "scores pairs of texts: name their columns text_1 and text_2"
    for flag, value in (("--prompt-column", "query"), ("--prompt-template", "{query}")):
        require_error(cli("score", source, "--model", encoder[0], flag, value), 2, f"{flag} has no meaning: ", told)
    require_error(cli("check", source, "--score", "--model", encoder[0], "--prompt-column", "query"), 2, told)
    with pytest.raises(UserError, match=told):
        run_file(source, tmp_path / "out.jsonl", model=encoder[0], task="score", system_prompt="a")


def test_texts_of_pairs_in_a_prompt(cli, model_folder, tmp_path):
    """A reranker that is a model of text takes both as one prompt: the fields stood beside it, and were a pair."""
    rows = [{"text_1": "ab", "text_2": "cd", "continuations": ["yes", "no"]}]
    source, target = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    flags = ("-o", target, "--model", model_folder, "--prompt-template", "{text_1}: {text_2}? ")
    assert cli("score", source, *flags).code == 0
    assert len(read_lines(target)[0]["scores"]) == 2


def test_what_the_report_says(cli, encoder, model_folder, tmp_path):
    """Pairs were log-probabilities of continuations, as were prompts that are scored themselves."""
    pairs, prompts = write_lines(tmp_path / "a.jsonl", ROWS), write_lines(tmp_path / "b.jsonl", [{"prompt": "ab"}])
    result = cli("score", pairs, "-o", tmp_path / "out.jsonl", "--model", encoder[0])
    assert "scoring: relevance of pairs" in result.err
    result = cli("score", prompts, "-o", tmp_path / "out.jsonl", "--model", model_folder)
    assert "scoring: log-probabilities of continuations or prompts" in result.err


@pytest.mark.parametrize("former", [None, "torch.nn.modules.activation.Sigmoid"])
def test_a_folder_of_sentence_transformers(encoder, tmp_path, former):
    """Its activation was read from config.json alone, where later versions do not write it; prompts were left out."""
    source, model, tokenizer = encoder
    folder = shutil.copytree(source, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "sbert_ce_default_activation_function": former}))
    own = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"q": "A B "}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with LLM(folder, dtype="float32") as llm:
        found = [output.outputs.score for output in llm.score(["C", "d e"], ["F", "j"])]
    pairs = [("a b c", "f"), ("a b d e", "j")]
    with torch.inference_mode():
        expected = [model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0].item() for pair in pairs]
    assert found == pytest.approx(expected, abs=2 * TOLERANCE)


def test_classes_of_pairs(cli, encoder, tmp_path):
    """Models of entailment: ``classify`` sent their rows to ``score``, which refuses a head with several labels."""
    source, model, tokenizer = encoder
    folder = shutil.copytree(source, tmp_path / "model")
    names = {0: "entails", 1: "says nothing", 2: "contradicts"}
    config = type(model.config)(
        **{**model.config.to_dict(), "id2label": names, "label2id": {v: k for k, v in names.items()}}
    )
    other = type(model)(config).eval()
    other.save_pretrained(folder)
    rows = [{"text_1": first, "text_2": second} for first, second in PAIRS]
    rows += [
        {"prompt": "a b"},
        {"text_1": "a"},
        {"text_1": "a", "text_2": ["b", "c"]},
        {"text_1": "a", "text_2": "b", "prompt": "c"},
    ]
    lines, target = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert cli("classify", lines, "-o", target, "--model", folder, "--dtype", "float32").code == 3
    found = read_lines(target)
    assert codes(found) == [None] * 5 + ["missing_prompt", "invalid_field", "missing_prompt"]
    for row, pair in zip(found, [*PAIRS, ("a b",)], strict=False):
        with torch.inference_mode():
            right_probs = other(**tokenizer(*pair, return_tensors="pt")).logits[0].softmax(0)
        assert row["probs"] == pytest.approx(right_probs.tolist(), abs=TOLERANCE)
        assert row["label"] == names[int(right_probs.argmax())]
    require_error(cli("score", lines, "--model", folder), 2, "has 3: use rosebatch classify")
