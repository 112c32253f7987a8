"""What a newcomer types wrong: one line says what it is and the way out, with exit code 2."""

import errno
import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from rosebatch.cli.app import app
from rosebatch.cli.other_names import COMMANDS, FLAGS
from tests.helpers.command_errors import require_error

FILES = {
    "in.jsonl": b'{"prompt":"a","max_tokens":1}\n',
    "pretty.json": b'{\n  "prompt": "a"\n}\n',
    "pretty.jsonl": b'{\n  "prompt": "a"\n}\n',
    "plain.txt": b"What is 2+2?\n\nWho are you?\n",
    "plain.jsonl": b"What is 2+2?\nWho are you?\n",
    "texts.jsonl": b'"What is 2+2?"\n"Who are you?"\n',
    "numbers.jsonl": b"1\n2\n",
    "rows.yaml": b"- prompt: a\n- prompt: b\n",
    "image.jsonl": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\n",
    "photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF\n",
    "paper.pdf": b"%PDF-1.7\n1 0 obj\n",
    "page.html": b"<!DOCTYPE html>\n<p>a</p>\n",
    "rows.db": b"SQLite format 3\x00" + bytes(84),
    "array.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<i8'}\n",
    "rows.pkl": b"\x80\x04\x95\x0e\x00\x00\x00]\x94}\n",
    "book.xlsx": b"PK\x03\x04" + bytes(20),
    "texts.json": b'["What is 2+2?", "Who are you?"]\n',
    "chats.json": b'[[{"role": "user", "content": "Who are you?"}]]\n',
    "sharegpt.jsonl": b'{"conversations":[{"from":"human","value":"a"}]}\n',
    "no_json/config.json": b"{",
    "bars.csv": b"prompt|id\na|1\n",
    "old.csv": b"question,answer\na,b\n",
    "semicolons.csv": b"prompt;id\na;1\n",
    "broken.parquet": b"no parquet",
    "schema.json": b'{"type": "objec"}',
    "bad.jinja": b"a\n{{ b",
    "model.bin": b"\x80\x02",
    "lines.csv": b'{"prompt":"a, b"}\n',
    "wrapped.json": b'{"data":[{"prompt":"a"},{"prompt":"b"}]}\n',
    "by_index.json": b'{"0":{"prompt":"a"},"1":{"prompt":"b"}}\n',
    "nested.jsonl": b'{"question":{"prompt":"a"},"answer":"b"}\n',
    "batch.jsonl": b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"a"}}\n',
    "folder/notes.md": b"# a\n",
    "adapter/adapter_config.json": b"{}",
}
# In place of a model's weights.
WEIGHTS = {"pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "torn": bytes(9)}
# Their names instead of those that are read.
OTHER_WEIGHTS = {"old_weights": "pytorch_model.bin", "quantized": "q8.gguf"}
# What follows "rosebatch"; M is a model folder. Then parts of the line.
INVOCATIONS = [
    # Commands.
    ("serve M", "serve is no command: use rosebatch generate, which reads a file and serves no port"),
    ("run-batch -i in.jsonl", "run-batch is no command: use rosebatch generate"),
    ("in.jsonl --model M", "in.jsonl is no command: use rosebatch generate in.jsonl"),
    ("genrate in.jsonl", "No such command 'genrate'. Did you mean 'generate'? rosebatch --help lists them"),
    ("--model M in.jsonl", "No such option: --model"),
    ("generate", "Missing argument 'INPUT': give a file of prompts, or - for stdin"),
    ("generate in.jsonl plain.txt --model M", "plain.txt: a command takes one INPUT: a folder or a pattern in quotes"),
    ("check", "Missing argument 'INPUT'"),
    ("merge in.jsonl", "Missing option '--output'"),
    # The way out was to name one of the parts.
    ("merge o.jsonl.1-of-2.part o.jsonl.2-of-2.part -o o.jsonl", "give INPUT as the shards had it"),
    # They were told of a flag that is not there.
    ("--help-all", "No such option: --help-all", "; --help lists all flags"),
    ("merge in.jsonl -o o.jsonl --frobnicate", "No such option: --frobnicate", "; --help lists all flags"),
    ("-h", "-h is no flag here: use --help"),
    # It was taken for --verbose.
    ("-V", "-V is no flag here: use rosebatch --version"),
    # Files with names of flags.
    ("generate input --model M", "rosebatch: error: input: no such file or folder"),
    ("check columns --model M", "rosebatch: error: columns: no such file or folder"),
    # Flags of other tools.
    ("generate in.jsonl -m M", "-m is no flag here: use --model"),
    ("generate --input-file in.jsonl --model M", "the input has no flag, use rosebatch generate INPUT"),
    ("generate in.jsonl --model M --num-gpus 2", "use -dp N for a model on each GPU, or -tp N for one over all"),
    ("generate in.jsonl --model M --tp 2", "--tp is no flag here: use --tensor-parallel-size (-tp)"),
    ("generate in.jsonl --model M --trust-remote-code", "no code of a model folder is ever run"),
    ("generate in.jsonl --model M --enforce-eager", "use --no-cuda-graph"),
    ("generate in.jsonl --model M --mem-fraction-static .8", "use --gpu-memory-utilization"),
    ("generate in.jsonl --model M --context-length 99", "use --max-model-len"),
    ("generate in.jsonl --model M --max-new-tokens 9", "use --max-tokens"),
    ("generate in.jsonl --model M --max_tokens 9", "--max_tokens is no flag here: use --max-tokens"),
    ("generate in.jsonl --model M --batch-size 9", "use --max-num-seqs"),
    ("generate in.jsonl --model M --output-file out.jsonl", "use --output (-o)"),
    ("generate in.jsonl --model M --fp16", "use --dtype float16"),
    ("generate in.jsonl --model M -n 2", "-n is no flag here: use --n"),
    ("check in.jsonl --model M --limit 9", "head -n N FILE | rosebatch generate -"),
    ("bench --batch-size 9", "use --max-num-seqs"),
    # Flags that sound alike were proposed.
    ("generate in.jsonl --model M --logit-bias {}", "--logit-bias is no flag here: logit_bias is a field of rows"),
    ("check in.jsonl --model M --guided-choice a", "--guided-choice is no flag here: guided_choice is a field of rows"),
    ("embed in.jsonl --model M --logit-bias {}", "No such option: --logit-bias"),
    ("generate in.jsonl --model M --best-of 3", "--best-of is no flag here: leave it out, rosebatch has no such"),
    ("generate in.jsonl --model M --do-sample", "--do-sample is no flag here: leave it out, a --temperature above 0"),
    ("generate in.jsonl --model M --format csv", "end the name of --output in .jsonl, .csv, .parquet or .arrow"),
    ("generate in.jsonl --model M --frobnicate", "No such option: --frobnicate", "--help-all lists all flags"),
    # Flags of another command: the nearest names were proposed, or the row's field.
    ("embed in.jsonl --model M --max-tokens 5", "--max-tokens is a flag of rosebatch generate and check, and has"),
    ("check in.jsonl --model M -dp 2", "-dp is a flag of rosebatch generate, embed, score, classify and bench,"),
    ("check in.jsonl --model M --resume", "--resume is a flag of rosebatch generate, embed, score and classify,"),
    ("check in.jsonl --model M --seed 1", "--seed is a flag of rosebatch generate and bench"),
    ("generate in.jsonl --model M --pooling mean", "--pooling is a flag of rosebatch embed, and"),
    # It was said to be generate's alone.
    ("score in.jsonl --model M --media-root .", "--media-root is a flag of rosebatch generate, embed and check, and"),
    ("cache --model M", "--model is a flag of rosebatch generate"),
    ("generate in.jsonl --model M --task embed", "--task is no flag here: use rosebatch embed"),
    ("generate in.jsonl --model M --n-gpu-layers 99", "leave it out, all layers are on one device"),
    ("generate in.jsonl --model M --system a", "--system is no flag here: use --system-prompt"),
    # Flags that sound alike were proposed, such as --seed for --sep.
    ("generate in.jsonl --model M --sep ';'", "--sep is no flag here: columns are separated by commas"),
    ("generate in.jsonl --model M --stream", "--stream is no flag here: leave it out, answers are written whole"),
    ("generate in.jsonl --model M --text-column a", "--text-column is no flag here: use --prompt-column"),
    ("generate in.jsonl --model M --prefix-cache=false", "--prefix-cache takes no value: --no-prefix-cache switches"),
    ("generate in.jsonl --model M --resume=yes", "--resume takes no value: leave it out to switch it off"),
    ("generate in.jsonl --model M --prefix-cache false", "false: switches take no value: --NAME is on, --no-NAME off"),
    # Values.
    ("generate in.jsonl --model M --max-tokens many", "--max-tokens must be a whole number"),
    ("generate in.jsonl --model M --max-pixels 1M", "--max-pixels must be a whole number, in digits alone"),
    ("generate in.jsonl --model M --max-tokens", "--max-tokens"),
    ("generate in.jsonl --model M --max-tokens 0", "--max-tokens must be >= 1, got 0"),
    ("generate in.jsonl --model M --temperature warm", "--temperature must be a number"),
    ("generate in.jsonl --model M --temperature -1", "--temperature must be >= 0, got -1"),
    ("generate in.jsonl --model M --top-p 90", "--top-p must be in (0, 1], got 90"),
    ("generate in.jsonl --model M --seed -1", "--seed must be in [0, 2^64), got -1"),
    ("generate in.jsonl --model M --dtype int8", "--dtype is impossible: 'int8' is not one of 'auto', 'float32'"),
    ("generate in.jsonl --model M --dtype fp16", "--dtype fp16: use --dtype float16"),
    ("check in.jsonl --model M --dtype half", "--dtype half: use --dtype float16"),
    ("check in.jsonl --model M --kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3: use --kv-cache-dtype fp8"),
    # Hints of one flag were given for the other, so what they named was refused too.
    ("check in.jsonl --model M --kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: use --kv-cache-dtype fp8"),
    ("check in.jsonl --model M --dtype fp8", "--dtype fp8: use --quantization fp8"),
    ("generate in.jsonl -q fp8", "fp8: use --quantization fp8, -q is --quiet"),
    ("check in.jsonl --model M --kv-cache-dtype half", "--kv-cache-dtype half: use --kv-cache-dtype none"),
    ("check in.jsonl --model M --kv-cache-dtype bfloat16", "--kv-cache-dtype bfloat16: use --kv-cache-dtype none"),
    ("check in.jsonl --model M --dtype fp8_e4m3", "--dtype is impossible: 'fp8_e4m3' is not one of"),
    ("check in.jsonl --model M --cache-type-k q8_0", "--cache-type-k is no flag here: use --kv-cache-dtype"),
    ("bench --dtype bf16", "--dtype bf16: use --dtype bfloat16"),
    ("generate in.jsonl --model M --device gpu", "--device", "'cuda'"),
    ("generate in.jsonl --model M --gpu-memory-utilization 90", "--gpu-memory-utilization must be in (0, 1], got 90"),
    ("generate in.jsonl --model M --kv-cache-memory 4TB", "--kv-cache-memory must be like 512MiB or 4GiB, got '4TB'"),
    ("check in.jsonl --model M --max-row-bytes 9X", "--max-row-bytes must be like 512MiB or 4GiB, got '9X'"),
    ("generate in.jsonl --model M --prompt-template '{ prompt }'", "no column  prompt  with these spaces"),
    ("generate in.jsonl --model M --max-model-len 99999", "--max-model-len 99999 must be between 2 and 256"),
    ("generate in.jsonl --model M -dp 0", "--data-parallel-size must be >= 1, got 0"),
    ("generate in.jsonl --model M -tp 3", "--tensor-parallel-size 3: the model has 4 heads, which cannot be divided"),
    ("generate in.jsonl --model M -dp many", "--data-parallel-size is impossible: 'many' is neither a number nor auto"),
    # It had a unit, and was told to have one.
    ("generate in.jsonl --model M --kv-cache-memory 1KiB", "--kv-cache-memory 1KiB: a block of 16 tokens takes 4096"),
    ("generate in.jsonl --model M --kv-cache-memory 4", "--kv-cache-memory 4: a block", "a size has a unit"),
    # All flags of columns were named.
    ("generate batch.jsonl --model M --system-prompt a", "rosebatch: error: --system-prompt has no meaning for an"),
    # All rows failed.
    ("embed in.jsonl --model M --dimensions 9999", "--dimensions 9999: a vector of the model has 32 numbers"),
    ("generate in.jsonl --model M --rows-per-file 0", "--rows-per-file must be >= 1"),
    ("generate in.jsonl --model M --stop ''", "--stop must be made of non-empty strings"),
    ("generate in.jsonl --model M --stop \udcff", "--stop must be made of non-empty strings"),
    ("generate in.jsonl --model M --regex \udcff", "a regex, grammar, schema or choice has characters that are no"),
    ("generate in.jsonl --model M --regex ''", "--regex is empty"),
    ("check in.jsonl --model M --json-schema ''", "--json-schema is empty"),
    ("check in.jsonl --model M --dtype f16", "--dtype f16: use --dtype float16"),
    ("generate in.jsonl --model M --min-tokens 2 --regex a", "--min-tokens and a grammar exclude each other"),
    ("generate in.jsonl --model M --echo-model", "--echo-model has no meaning without an OpenAI batch"),
    ("generate in.jsonl --model M --prompt-template {a}\udcff", "--prompt-template must be text, got '{a}\\udcff'"),
    ("check in.jsonl --model M --system-prompt \udcff", "--system-prompt must be text"),
    ("generate in.jsonl --model M --columns \udcff", "--columns must be text"),
    ("generate in.jsonl --model M --regex '('", "the regex cannot be used"),
    ("generate in.jsonl --model M --json-schema none.json", "--json-schema none.json: No such file", "'{…}'"),
    ("generate in.jsonl --model M --json-schema schema.json", "the JSON schema cannot be used: Invalid type: objec"),
    ("generate in.jsonl --model M --json-schema '{\"type\":'", "the JSON schema cannot be used: Expecting value"),
    ("generate in.jsonl --model M --regex a --json-schema '{}'", "--regex and --json-schema exclude each other"),
    ("generate in.jsonl --model M --chat-template none.jinja", "--chat-template none.jinja: No such file"),
    ("generate in.jsonl --model M --no-such-cache", "No such option: --no-such-cache"),
    ("generate old.csv --model M --prompt-column quest", "has no such column, but question, answer"),
    ("generate in.jsonl --model M -o a.jsonl --output b.jsonl", "--output names one place, and is given 2 times"),
    ("merge in.jsonl -o a.jsonl --errors a --errors=b", "--errors names one place, and is given 2 times"),
    ("cache rm llama", "rm llama: rosebatch cache takes no names; --clear deletes all that it lists"),
    ("bench in.jsonl", "in.jsonl: rosebatch bench makes its own requests and reads no INPUT"),
    ("check in.jsonl --model M --embed --top-k 3", "nothing is generated, so --top-k have no meaning"),
    # A variable of the shell that is not set: all files of the working directory were read, or results went to stdout.
    ("generate '' --model M", "INPUT is empty"),
    ("check '' --model M", "INPUT is empty"),
    ("generate in.jsonl --model ''", "--model must not be empty"),
    ("generate in.jsonl --model M --tokenizer ''", "--tokenizer must not be empty"),
    ("generate in.jsonl --model M -o ''", "--output is empty: name a file"),
    # Models.
    ("generate in.jsonl --model none", "none: no such model; give a model folder, a .gguf file, a .toml"),
    # It was shown as an id of the Hub.
    ("generate in.jsonl --model ./a/b", "rosebatch: error: ./a/b: no such model"),
    ("generate in.jsonl --model old_weights", "pytorch_model.bin is not read, for it may run code: save_pretrained"),
    ("generate in.jsonl --model quantized", "give the file itself, --model quantized/q8.gguf"),
    # Its config.json was to be made lines.
    ("generate M --model M", "is a model, which --model names: INPUT is a file of prompts"),
    ("generate in.jsonl --model http://a/b", "http://a/b: no such model; give a model folder"),
    ("generate in.jsonl --model no_json", "no_json/config.json: no JSON: "),
    ("generate in.jsonl --model model.bin", "model.bin: not a model; give a model folder, a .gguf file"),
    ("generate in.jsonl --model folder", "config.json: no such file"),
    ("generate in.jsonl --model adapter", "an adapter alone: give its model, to --model, and --lora NAME=adapter"),
    ("generate in.jsonl --model pointer", "a pointer of Git LFS: git lfs pull brings the file itself"),
    ("check in.jsonl --model pointer", "model.safetensors: a pointer of Git LFS"),
    ("generate in.jsonl --model torn", "model.safetensors: unreadable weights: copy or download the file again"),
    ("generate in.jsonl --model M --revision main", "--revision main needs a Hugging Face id (ORG/NAME)"),
    ("generate in.jsonl --model M --tokenizer none", "--tokenizer none: no such folder"),
    # What fits the device was told first.
    ("generate in.jsonl --model M --tokenizer folder", "--tokenizer folder: has no tokenizer"),
    ("check in.jsonl --model M --tokenizer folder", "--tokenizer folder: has no tokenizer"),
    ("generate in.jsonl --model M --chat-template bad.jinja", "bad.jinja, line 2: not a valid Jinja chat template"),
    # Inputs.
    ("generate none.jsonl --model M", "none.jsonl: no such file or folder"),
    ("generate 'Tell me a joke' --model M", "a prompt itself goes to stdin: echo '{\"prompt\": \"…\"}' | rosebatch"),
    # The line about the demo model came first.
    ("generate none.jsonl", "none.jsonl: no such file or folder"),
    ("generate 'none/*.jsonl' --model M", "none/*.jsonl"),
    ("generate folder --model M", "folder: no files found; a folder needs .jsonl"),
    ("generate pretty.json --model M", "nor one object per line; put [ and", "jq -c . pretty.json > prompts.jsonl"),
    ("generate pretty.jsonl --model M", "is JSON on several lines", "jq -c . pretty.jsonl > prompts.jsonl"),
    ("generate plain.txt --model M", "a row is one on a line", "jq -cR '{prompt: .}' plain.txt > prompts.jsonl"),
    ("check plain.jsonl --model M", "plain.jsonl: has no JSON objects"),
    ("generate texts.jsonl --model M", "jq -c '{prompt: .}' texts.jsonl > prompts.jsonl"),
    ("generate texts.json --model M", "if each item is a prompt: jq -c '.[] | {prompt: .}' texts.json > pro"),
    ("check chats.json --model M", "if each item is a chat: jq -c '.[] | {messages: .}' chats.json > prompts.jsonl"),
    ("generate sharegpt.jsonl --model M", "conversations is ShareGPT's form: write messages with role and content"),
    ("check bars.csv --model M", "but prompt|id: --prompt-column NAME", "columns are separated by commas"),
    # They were to name a column.
    ("generate lines.csv --model M", "lines of JSON need --input-format jsonl"),
    ("generate wrapped.json --model M", "but data: rows are inside of one: jq -c '.data[]' wrapped.json > prompts"),
    ("generate by_index.json --model M", "but 0, 1: rows are inside of one: jq -c '.[]' by_index.json > prompts"),
    ("generate nested.jsonl --model M", "but question, answer: --prompt-column NAME says which"),
    ("generate batch.jsonl --model M --input-format jsonl", "OpenAI requests need no --input-format jsonl"),
    ("generate numbers.jsonl --model M", "numbers.jsonl: has no JSON objects"),
    ("generate rows.yaml --model M", "rows.yaml: has no JSON objects"),
    ("embed image.jsonl --model M", "image.jsonl is a PNG image: images and PDFs need rosebatch generate or"),
    ("generate photo.jpg --model M", "photo.jpg is a JPEG image"),
    ("generate paper.pdf --model M", "paper.pdf is a PDF"),
    ("generate page.html --model M", "page.html is an HTML page"),
    ("generate rows.db --model M", "rows.db is an SQLite database"),
    ("generate array.npy --model M", "array.npy is a NumPy array"),
    ("generate rows.pkl --model M", "rows.pkl is no text: only JSON, CSV, Parquet and Arrow are read"),
    ("generate book.xlsx --model M", "book.xlsx is a zip archive or a spreadsheet"),
    ("generate old.csv --model M", "old.csv: has none of the columns prompt", "question, answer"),
    ("generate semicolons.csv --model M", "semicolons.csv: has none of the columns prompt"),
    ("generate broken.parquet --model M", "broken.parquet: unreadable Parquet"),
    ("generate in.jsonl --input-format xml --model M", "--input-format"),
    # Outputs.
    ("generate in.jsonl --model M -o none/out.jsonl", "none/out.jsonl: the folder none is missing: mkdir -p none"),
    ("generate in.jsonl --model M -o 'no ne/a/'", "no ne/a: the folder no ne is missing: mkdir -p 'no ne'"),
    ("generate in.jsonl --model M -o o.jsonl --errors none/e.jsonl", "the folder none is missing: mkdir -p none"),
    ("generate in.jsonl --model M -o out.xlsx", "-o out.xlsx: is written as JSONL"),
    ("embed in.jsonl --model M -o out.npy", "-o out.npy: is written as JSONL"),
    ("generate in.jsonl --model M -o in.jsonl", "in.jsonl"),
    ("generate in.jsonl --model M --resume", "-o FILE"),
    ("generate in.jsonl --model M --report none/r.html", "--report none/r.html: the folder none is missing"),
    # A page or JSON was written under any name.
    ("generate in.jsonl --model M --report r.pdf", "--report r.pdf: is written as .html or .json"),
    ("bench --report r.pdf", "--report r.pdf: is written as .html or .json"),
    ("bench --scenario none", "none: no such scenario or suite"),
    ("bench --against vlm", "--against vlm: no such engine; choose from vllm"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder):
    root = tmp_path_factory.mktemp("newcomer")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    for name, content in WEIGHTS.items():
        shutil.copytree(model_folder, root / name)
        (root / name / "model.safetensors").write_bytes(content)
    for name, other in OTHER_WEIGHTS.items():
        shutil.copytree(model_folder, root / name)
        (root / name / "model.safetensors").rename(root / name / other)
    return root


@pytest.mark.parametrize(("command", "parts"), [(command, parts) for command, *parts in INVOCATIONS])
def test_one_line_and_the_way_out(cli, model_folder, folder, monkeypatch, command, parts):
    """Tracebacks, "No such option" and 4,000 rows of "invalid character (byte 0)" left newcomers where they were."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    arguments = [str(model_folder) if each == "M" else each for each in shlex.split(command)]
    require_error(cli(*arguments), 2, *parts)
    assert sorted(folder.rglob("*")) == before, "nothing is left behind"


def test_a_schema_on_the_command_line(cli, model_folder, folder, monkeypatch):
    """It was looked for as a file. Two slashes in it are no path's."""
    monkeypatch.chdir(folder)
    schema = json.dumps({"const": "a//b"})
    result = cli("generate", "in.jsonl", "--model", model_folder, "-q", "--json-schema", schema, "--temperature", 0)
    assert result.code == 0 and json.loads(result.out)["text"].startswith('"')


def test_names_of_other_tools_are_none_of_ours():
    """A flag or command that rosebatch gets one day is no longer explained away."""
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert not commands & COMMANDS.keys()
    parameters = [each for command in get_command(app).commands.values() for each in command.params]
    own = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    assert not own & FLAGS.keys()
    hints = " ".join([*FLAGS.values(), *COMMANDS.values()])
    named = {word.strip("(),:") for word in hints.split() if word.startswith("-") and len(word.strip("(),:")) > 1}
    assert named - own == {"--version", "-n"}


@pytest.mark.parametrize("flag", ["--stop", "--prompt-template", "--system-prompt"])
def test_a_line_break_that_the_shell_left_alone(cli, model_folder, folder, monkeypatch, flag):
    """Two characters stood in each prompt, and as a stop string they never came."""
    monkeypatch.chdir(folder)
    text = "{prompt}\\n" if flag == "--prompt-template" else "\\n"
    told = f"rosebatch: warning: {flag}: has a backslash and an n; a shell writes a line break as $'\\n'\n"
    assert cli("check", "in.jsonl", "--model", model_folder, flag, text).err == told
    if flag == "--prompt-template":
        assert told in cli("embed", "in.jsonl", "--model", "none", flag, text).err
    assert cli("check", "in.jsonl", "--model", model_folder, flag, text.replace("\\n", "\n")).err == ""


@pytest.mark.parametrize(
    ("method", "command", "told"),
    [
        ("iterdir", "generate folder --model M", "folder: Permission denied"),
        ("exists", "generate folder/in.jsonl --model M", "folder/in.jsonl: Permission denied"),
        ("exists", "generate in.jsonl --model folder/m", "folder/m: Permission denied"),
        ("exists", "generate in.jsonl --model M --tokenizer folder/m", "folder/m: Permission denied"),
        ("iterdir", "generate in.jsonl --model folder", "folder/config.json: no such file"),
        # safetensors called it missing, and the way out was to download it again.
        ("open", "generate in.jsonl --model torn", "torn/model.safetensors: Permission denied"),
    ],
)
def test_without_permission(cli, model_folder, folder, monkeypatch, method, command, told):
    """An error of Python was shown, with the exit code of a run that failed."""
    monkeypatch.chdir(folder)
    plain = getattr(Path, method)

    def refuse(path, *args, **options):
        if path.parts[:1] == ("folder",) or path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *args, **options)

    monkeypatch.setattr(Path, method, refuse)
    arguments = [str(model_folder) if each == "M" else each for each in shlex.split(command)]
    require_error(cli(*arguments), 2, told)


def test_an_output_that_cannot_be_read(cli, model_folder, folder, monkeypatch, tmp_path):
    """The new one keeps its mode, so its hash could not be computed, after all rows were."""
    output = tmp_path / "out.jsonl"
    output.write_text("")
    output.chmod(0o200)
    monkeypatch.chdir(folder)
    result = cli("generate", "in.jsonl", "--model", model_folder, "-o", output)
    require_error(result, 2, "out.jsonl: its mode does not let its owner read it, and results keep the mode: delete it")
