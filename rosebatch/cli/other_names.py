"""What users of other tools type, and what that is here."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from rosebatch.config.quantization import QUANTIZATIONS
from rosebatch.config.run import DTYPES, KV_CACHE_DTYPES
from rosebatch.config.switches import Switches, flag

# By what to do here: flags of vLLM, SGLang, llama.cpp, transformers, and of habit.
_FLAGS = {
    "use --model": "-m --model-path --model-name --model-id --hf-model --hf-repo",
    "the input has no flag, use rosebatch generate INPUT": (
        "-i -f --input --input-file --input-path --file --prompts --prompt-file --dataset"
    ),
    "give a file of prompts, or - and one JSON object a line on stdin": "-p",
    "use --output (-o)": "--out --output-file --output-path --output-dir --save-path --results",
    "use --tensor-parallel-size (-tp): GPUs that hold one model together": "--tp --tp-size --tensor-parallel",
    "use --data-parallel-size (-dp): workers with a model each": (
        "--dp --dp-size --data-parallel --workers --num-workers -j -w"
    ),
    "use -dp N for a model on each GPU, or -tp N for one over all": "-g --num-gpus --gpus --num-gpu --ngpus",
    "use -tp N, which divides each layer": "-pp --pp --pp-size --pipeline-parallel-size",
    "set CUDA_VISIBLE_DEVICES in front of the command": "--gpu-ids --gpu-id --base-gpu-id",
    "use --device cuda": "--gpu --cuda",
    "use --device cpu": "--cpu",
    "use --dtype float16": "--half --fp16 --float16",
    "use --dtype bfloat16": "--bf16 --bfloat16",
    "use --dtype": "--torch-dtype --precision",
    "leave it out, no code of a model folder is ever run": "--trust-remote-code",
    "leave it out, the checkpoint says how its weights are stored": ("--load-in-4bit --load-in-8bit"),
    "use --quantization": "--quantize",
    "leave it out, each token of an fp8 KV cache has a scale of its own": (
        "--calculate-kv-scales --no-calculate-kv-scales --quantization-param-path"
    ),
    "use --kv-cache-dtype": "-ctk -ctv --cache-type-k --cache-type-v",
    "use --max-model-len": "-c --context-length --ctx-size --n-ctx --max-seq-len --max-sequence-length",
    "use --max-num-seqs": ("-b --batch-size --max-batch-size --max-running-requests --concurrency --max-concurrency"),
    "use --max-num-batched-tokens": "--chunked-prefill-size --max-prefill-tokens --max-num-tokens",
    "use --gpu-memory-utilization": "--mem-fraction-static --gpu-memory --gpu-mem-util",
    "use --kv-cache-memory": "--kv-cache-memory-bytes",
    "use --block-size": "--page-size",
    "use --no-cuda-graph": "--enforce-eager --disable-cuda-graph",
    "use --no-prefix-cache": "--disable-radix-cache --no-enable-prefix-caching",
    "use --no-chunked-prefill": "--no-enable-chunked-prefill",
    "leave it out, it is so by default": (
        "--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice --enable-reasoning"
    ),
    "leave it out, there is one choice": (
        "--guided-decoding-backend --grammar-backend --attention-backend --distributed-executor-backend"
        " --compilation-config --max-seq-len-to-capture"
    ),
    "leave it out, all layers are on one device": "-ngl --gpu-layers --n-gpu-layers",
    "use --limit-images": "--limit-mm-per-prompt",
    "use --max-pixels": "--mm-processor-kwargs",
    "use --media-root": "--allowed-local-media-path",
    "use --media-domains": "--allowed-media-domains",
    "name images as INPUT, with --prompt": "--image --images --image-dir --image-folder",
    "use --image-column": "--image-field --images-column",
    "use rosebatch embed": "--task --runner --is-embedding",
    "put chat_template_kwargs into the rows": "--default-chat-template-kwargs",
    "give its fields by flags, such as --top-p": "--override-generation-config",
    "use --system-prompt": "--system --system-message",
    "use --max-tokens": "--max-new-tokens --max-length --n-predict --num-predict --max-output-tokens",
    "use --temperature": "-t --temp",
    "use --seed": "-s --random-seed",
    "use --n": "-n --num-samples --num-return-sequences --n-samples",
    "leave it out, a --temperature above 0 samples": "--do-sample",
    "use --repetition-penalty": "--repeat-penalty",
    "use --stop": "--stop-sequences --stop-strings",
    "use --json-schema": "--guided-json --schema --response-format",
    "use --regex": "--guided-regex --pattern",
    "use --tokenizer": "--tokenizer-path --tokenizer-name",
    "use --chat-template": "--template --jinja-template",
    "use --quiet (-q)": "--disable-log-stats --disable-log-requests --no-progress --silent",
    "leave it out, progress and a report are shown unless --quiet is given": "-v --verbose --debug --log-level",
    "leave it out, a run without --resume replaces the output": "-y --overwrite --force",
    "use --lora NAME=FOLDER": "--enable-lora --lora-modules --lora-paths --lora-adapter --adapter",
    "use --max-loras": "--max-loras-per-batch",
    "leave it out, all adapters are loaded with the model": "--max-lora-rank --max-cpu-loras",
    "use rosebatch check": "--dry-run",
    "use --help": "-h",
    "use rosebatch --version": "-V",
    "end the name of --output in .jsonl, .csv, .parquet or .arrow": "--format --output-format",
    "set HF_HOME in front of the command": "--cache-dir --download-dir",
    "set HF_TOKEN in front of the command": "--token --hf-token",
    "use --resume": "--continue --restart",
    "give fewer lines, head -n N FILE | rosebatch generate -": "--limit --max-samples --head --num-rows --max-rows",
    "give the others, tail -n +K FILE | rosebatch generate - begins with line K": "--start --offset --skip",
    "give them in that order, shuf FILE | rosebatch generate -": "--shuffle",
    "use --prompt-column": "--text-column --input-column --prompt-field --text-field --input-field",
    "columns are separated by commas, in a .tsv by tabs": "--sep --separator --delimiter",
    "input is UTF-8, and iconv converts to it": "--encoding",
    "name the files of the split as INPUT": "--split --subset --dataset-split",
    "leave it out, each row is kept once it is ready, and --resume continues": (
        "--checkpoint --checkpoint-dir --save-every --save-steps"
    ),
    "leave it out, answers are written whole": "--stream --streaming",
    "name another file, for a run replaces its output": "--append",
    "put structured_outputs into the rows": "--grammar --grammar-file --guided-grammar",
    "give its settings by flags": "--config --config-file",
    "leave it out, rosebatch reads files and serves no port": "--host --port --api-key --base-url --api-base",
    "leave it out, rosebatch has no such feature": "--swap-space --cpu-offload-gb --best-of",
    "use LLM.beam_search of the library": "--num-beams --use-beam-search",
    "leave it out, a run finds how many drafts pay": "--num-speculative-tokens --speculative-num-steps",
    "use --speculative-model, with an EAGLE-3 head": (
        "--speculative-config --speculative-draft-model-path --draft-model --eagle-model"
    ),
}
_COMMANDS = {
    "generate": "run-batch run gen batch infer inference predict complete chat",
    "generate, which reads a file and serves no port": "serve server launch_server",
    "embed": "embeddings embedding encode",
    "score": "logprobs loglikelihood perplexity rerank",
    "classify": "classification classifier label reward",
    "bench": "benchmark throughput",
    "check": "validate lint test",
    "merge": "join concat",
    "--help": "help",
    "--version": "version",
}
FLAGS = {name: hint for hint, names in _FLAGS.items() for name in names.split()}
COMMANDS = {name: hint for hint, names in _COMMANDS.items() for name in names.split()}

_NO_OPTION = re.compile(r"No such option: (\S+)")
_NO_COMMAND = re.compile(r"No such command '([^']*)'")
_FIELD = re.compile(r"([a-z][a-z_]*)(?= must | and a )")
_VALUE = re.compile(r"Invalid value for '(--[\w-]+)[^:]*': (?:Value error, )?(.*)")
_CHOICE = re.compile(r"Invalid value for '(--dtype|--kv-cache-dtype)[^:]*: (?:Value error, )?'([^']*)' is not one of")
# Other tools' values of a flag. A 16-bit KV cache has the dtype of the run here.
_OTHER_VALUES = {
    "--dtype": DTYPES
    | {"f16": "float16", "f32": "float32"}
    | dict.fromkeys(["fp8", "float8_e4m3fn"], "--quantization fp8"),
    "--kv-cache-dtype": KV_CACHE_DTYPES
    | dict.fromkeys(["float16", "bfloat16", "half", "fp16", "bf16", "f16"], "none")
    | {"fp8_e5m2": "fp8"},
}
# What the parser says of a value, and what we say.
_REASONS = {
    r"Input should be a valid integer.*": "must be a whole number, in digits alone",
    r"Input should be a valid number.*": "must be a number",
    r"Input should be greater than or equal to (.*)": r"must be >= \1",
    r"(.*?)\.?": r"is impossible: \1",
}
# Commands whose rows have all fields.
_OF_ROWS = ("generate", "check")
# Commands that read no file of rows.
_NO_INPUT = {
    "bench": "makes its own requests and reads no INPUT; --model names the model",
    "cache": "takes no names; --clear deletes all that it lists",
}
_VALUES = ("true", "false", "yes", "no", "on", "off", "0", "1")
_NO_VALUE = re.compile(r"Option '(?:--no-|--)([\w-]+)' does not take a value\.")
_SEVERAL = re.compile(r"Got unexpected extra argument\(?s?\)? \((.*)\)")


def explained(
    message: str, flags: Collection[str], command: str | None = None, others: Mapping[str, str] | None = None
) -> str:
    """The message of a command line that cannot be read, with what the user probably meant.

    Args:
        message: of the parser.
        flags: names of all flags.
        command: whose flags they are.
        others: flags of other commands, with the names of these.
    """
    if match := _NO_OPTION.match(message):
        name = match[1]
        own = name.replace("_", "-").lower()
        hint = f"use {own}" if own in flags else FLAGS.get(name) or FLAGS.get(own)
        # The parser takes -dp for -d and -p.
        named = [each for each in others or {} if each == name or (len(name) == 2 and each.startswith(name))]
        if hint is None and named:
            return f"{named[0]} is a flag of rosebatch {(others or {})[named[0]]}, and has no meaning here"
        if hint is None and command in _OF_ROWS and _is_field(field := own.strip("-").replace("-", "_")):
            hint = f"{field} is a field of rows"
        every = "--help-all" if "--help-all" in flags else "--help"
        return f"{name} is no flag here: {hint}" if hint else f"{message}; {every} lists all flags"
    if match := _NO_COMMAND.match(message):
        name = match[1]
        meant = f"generate {name}" if Path(name).exists() else COMMANDS.get(name)
        return f"{name} is no command: use rosebatch {meant}" if meant else f"{message} rosebatch --help lists them"
    if (match := _CHOICE.match(message)) and (own := _OTHER_VALUES[match[1]].get(match[2])):
        return f"{match[1]} {match[2]}: use {own if own.startswith('--') else f'{match[1]} {own}'}"
    if match := _VALUE.match(message):
        told = (found.expand(ours) for theirs, ours in _REASONS.items() if (found := re.fullmatch(theirs, match[2])))
        return f"{match[1]} {next(told, match[2])}"
    if message == "Missing argument 'INPUT'.":
        return "Missing argument 'INPUT': give a file of prompts, or - for stdin"
    if match := _NO_VALUE.match(message):
        has_opposite = match[1].replace("-", "_") in Switches.__dataclass_fields__
        off = f"--no-{match[1]} switches it off" if has_opposite else "leave it out to switch it off"
        return f"--{match[1]} takes no value: {off}"
    if match := _SEVERAL.match(message):
        if match[1].lower() in _VALUES:
            return f"{match[1]}: switches take no value: --NAME is on, --no-NAME off"
        if match[1] in QUANTIZATIONS:
            return f"{match[1]}: use --quantization {match[1]}, -q is --quiet"
        if command == "merge":
            return f"{match[1]}: give INPUT as the shards had it; they are found by the name of --output"
        if command in _NO_INPUT:
            return f"{match[1]}: rosebatch {command} {_NO_INPUT[command]}"
        several = "a folder or a pattern in quotes stands for several files, --model names the model"
        return f"{match[1]}: a command takes one INPUT: {several}"
    return message


def _is_field(name: str) -> bool:
    """Whether rows have it; imported late, because it takes as long as all flags."""
    from rosebatch.io.rows import REQUEST_FIELDS

    return name in REQUEST_FIELDS


def by_flag(message: str, fields: Collection[str]) -> str:
    """A message about a field, by its flag: ``top_p must be …`` as ``--top-p must be …``."""
    match = _FIELD.match(message)
    if match is None or match[1] not in fields:
        return message
    return f"{flag(match[1])}{message[match.end() :]}"
