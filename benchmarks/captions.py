"""Captions of JPEGs beside vLLM: from files to texts, random weights of Qwen3-VL's shapes.

``python -m benchmarks.captions --tokenizer FOLDER [--shape 2b] [--rows 3000] [--engines rosebatch vllm]``. Each engine
has a process of its own, one after the other, and reads the same folder of a model and the same images, all of which
differ. Loading the model does not count, the images do. The GPU's utilization is what nvidia-smi says ten times a
second. The last line is JSON: of each engine the rows a second, and the share of time in which the GPU was busy behind
the first second. ``--shape tiny`` runs on a CPU.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.image_preparation import PROCESSOR, picture
from benchmarks.options import options
from benchmarks.random_folder import fill_vocabulary, random_weights

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""
# Of Qwen3-VL-2B and -8B, from their config.json.
_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "tie_word_embeddings": True,
            "head_dim": 16,
        }
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "deepstack_visual_indexes": [0], "num_heads": 2},
    ),
    "2b": (
        {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "tie_word_embeddings": True}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "8b": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "tie_word_embeddings": False}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
}
_VOCABULARY = 151_936
_QUESTION = "Describe this picture."


def main() -> None:
    """Write the model and the images, run the engines."""
    given = options(
        __doc__,
        tokenizer=str,
        shape=("2b", "8b", "tiny"),
        rows=3000,
        output_len=100,
        engines=["rosebatch", "vllm"],
        vllm_path=None,
        folder=None,
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder, started = Path(name), time.perf_counter()
        _write_model(folder / "model", Path(given.tokenizer), given.shape)
        (folder / "images").mkdir()
        with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as processes:
            list(processes.map(_write_image, [folder / "images" / f"{n}.jpg" for n in range(given.rows)], chunksize=16))
        sys.stderr.write(f"captions: model and images are written in {time.perf_counter() - started:.0f} s\n")
        found = {}
        for engine in given.engines:
            paths = [given.vllm_path] if engine == "vllm" and given.vllm_path else []
            environment = os.environ | {"PYTHONPATH": os.pathsep.join((*paths, os.environ.get("PYTHONPATH", "")))}
            command = [sys.executable, "-m", "benchmarks.captions", "--run", engine, str(folder), str(given.output_len)]
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            found[engine] = (
                json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else {"failed": ran.returncode}
            )
            sys.stdout.write(f"{engine:<12}{json.dumps(found[engine])}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def _write_model(folder: Path, tokenizer: Path, shape: str) -> None:
    folder.mkdir()
    values = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    size = _VOCABULARY if shape != "tiny" else len(vocabulary) + len(_VISION)
    fill_vocabulary(vocabulary, size - len(_VISION))
    ids = {token: size - len(_VISION) + number for number, token in enumerate(_VISION)}
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    values["added_tokens"] += [{"id": id_, "content": token, **plain} for token, id_ in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"chat_template": _TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": _TEMPLATE}), encoding="utf-8")
    end = vocabulary[config["eos_token"]]
    text, tower = _SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": 5_000_000, "mrope_interleaved": True}
    rope["mrope_section"] = [24, 20, 20] if shape != "tiny" else [4, 2, 2]
    text = {**text, "vocab_size": size, "rope_theta": 5_000_000, "rope_scaling": rope, "rms_norm_eps": 1e-6} | {
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_vl_text",
        "eos_token_id": end,
    }
    tower = {"num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **tower} | {
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 2304,
        "model_type": "qwen3_vl",
    }
    whole = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": end,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text,
        "vision_config": tower,
    }
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    image = PROCESSOR | {"processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    video = image | {"video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    save_file(random_weights(model, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})


def _write_image(path: Path) -> None:
    path.write_bytes(picture(1024, 768, int(path.stem)))


def _run(engine: str, folder: Path, output_len: int) -> None:
    """Load, then time all rows; the last line of stdout is the result."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    images = sorted((folder / "images").iterdir(), key=lambda path: int(path.stem))
    generate = {"rosebatch": _rosebatch, "vllm": _vllm}[engine](folder, output_len)
    # What an engine does at its first images.
    generate(images[:8])
    with _utilization() as busy:
        started = time.perf_counter()
        tokens = generate(images[8:])
        seconds = time.perf_counter() - started
    rows = len(images) - 8
    found = {"rows": rows, "tokens": tokens, "seconds": round(seconds, 2), "rows/s": round(rows / seconds, 2)}
    samples = busy[10:]
    answer.write(json.dumps(found | {"gpu busy": round(sum(samples) / len(samples) / 100, 3) if samples else None}))
    answer.flush()
    # Engines leave processes behind.
    os._exit(0)


def _chat(source: str) -> list[Mapping[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": source}}
    return [{"role": "user", "content": [image, {"type": "text", "text": _QUESTION}]}]


def _rosebatch(folder: Path, output_len: int) -> Callable[[list[Path]], int]:
    from rosebatch.llm.llm import LLM
    from rosebatch.llm.run_file import run_file

    llm = LLM(str(folder / "model"))

    def generate(images: list[Path]) -> int:
        source, target = folder / "rows.jsonl", folder / "answers.jsonl"
        source.write_text("".join(json.dumps({"messages": _chat(path.name)}) + "\n" for path in images))
        sampling = {"max_tokens": output_len, "ignore_eos": True, "temperature": 0}
        target.unlink(missing_ok=True)
        run_file(source, target, model=llm, sampling=sampling, media_root=folder / "images")
        lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
        assert not [line["error"] for line in lines if line.get("error")]
        return sum(line["usage"]["completion_tokens"] for line in lines)

    return generate


def _vllm(folder: Path, output_len: int) -> Callable[[list[Path]], int]:
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    # FlashInfer compiles its sampler for minutes, and all is greedy here.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # Its engine hung at its start. A likely reason: it prepares an image here, and a fork has none of the threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import vllm

    llm = vllm.LLM(
        str(folder / "model"),
        seed=0,
        max_model_len=8192,
        limit_mm_per_prompt={"image": 1, "video": 0},
        allowed_local_media_path=str(folder / "images"),
    )
    sampling = vllm.SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0)

    def generate(images: list[Path]) -> int:
        outs = llm.chat([_chat(f"file://{path}") for path in images], sampling, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs)

    return generate


@contextmanager
def _utilization() -> Iterator[list[int]]:
    """A list that grows by percentages of the GPU's time, ten a second; empty without nvidia-smi."""
    samples: list[int] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    command += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0")]
    with tempfile.TemporaryFile("w+") as file, subprocess.Popen(command, stdout=file) as process:
        yield samples
        process.terminate()
        process.wait()
        file.seek(0)
        samples += [int(line) for line in file if line.strip().isdigit()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
