"""The library: a model that completes prompts, chats and streams of them."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rosebatch.config.run import DEMO_ANSWERS, RunConfig
from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import GREEDY, SamplingParams
from rosebatch.host.garbage import searched_rarely
from rosebatch.host.openmp import wait_passively
from rosebatch.host.pretrained import load_pretrained_tokenizer
from rosebatch.host.threads import on_thread
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.tasks.classify import CLASSIFY
from rosebatch.io.tasks.score import SCORE
from rosebatch.job.memory_estimate import row_bytes
from rosebatch.job.report.progress import Progress
from rosebatch.job.seeds import row_seed
from rosebatch.job.service import Service
from rosebatch.llm.awaited import AwaitedCalls
from rosebatch.llm.backend import Backend, launched_of, load_backend
from rosebatch.llm.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from rosebatch.llm.call import Call
from rosebatch.llm.call_queue import CallQueue
from rosebatch.llm.classes import CLASSES, REWARDS, ClassificationRequestOutput
from rosebatch.llm.embeddings import EMBEDDINGS, EmbeddingRequestOutput
from rosebatch.llm.lora_request import names_of
from rosebatch.llm.on_error import OnError, check_on_error, checked
from rosebatch.llm.outputs import COMPLETIONS, RequestOutput
from rosebatch.llm.prompts import (
    Prompt,
    chats_fields,
    continuations_of,
    one_for_each,
    prompt_fields,
    several,
    text_pairs,
)
from rosebatch.llm.scores import PAIRS, SCORES, ScoreRequestOutput, ScoringRequestOutput
from rosebatch.llm.vllm_names import WithoutMethods, own_names, require_neutral

if TYPE_CHECKING:
    from rosebatch.launch.launch import Launched
    from rosebatch.launch.plan import LaunchPlan

# Prompts of a stream that are read ahead.
_MAX_WAITING = 64
_REWARD = PoolingParams(task="classify", activation="none")
# A prompt of so many bytes counts as two.
_COUNTS_TWICE = 1 << 20


def _weight(row: Row | FailedRow | None) -> int:
    return 1 if row is None else 1 + row_bytes(row) // _COUNTS_TWICE


class LLM(WithoutMethods):
    """A loaded model.

    Use it as often as you like. As a context manager, or by ``close``, it gives the GPU's memory back. ::

        from rosebatch import LLM, SamplingParams

        with LLM("Qwen/Qwen3-0.6B") as llm:
            outputs = llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=16))
            for output in outputs:
                print(output.prompt, output.outputs[0].text)

    Args:
        model: hub id ``ORG/NAME[@REVISION]``, model folder, ``.gguf`` file, or ``.toml`` of shapes; None for the demo
            model.
        seed: base seed of prompts that sample without a seed of their own: two processes that make the same calls get
            the same results. None and 0 do so, too.
        media_root: texts may name images below this folder. What a prompt brings itself, such as a picture, needs none.
        media_domains: texts may name images of these hosts.
        limit_images: most images of a prompt; None for 32.
        max_pixels: most pixels of an image, which is made smaller for the model; None for the model's own.
        settings: fields of ``rosebatch.config.run.RunConfig`` and of ``config.switches.Switches`` by name, such
            as ``max_model_len=4096`` or ``prefix_cache=False``. vLLM's names of the same things work too.

    Raises:
        ValueError: a setting does not exist, or its value is impossible.
        UserError: the model is missing or unreadable.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        seed: int | None = None,
        media_root: str | Path | None = None,
        media_domains: Sequence[str] = (),
        limit_images: int | None = None,
        max_pixels: int | None = None,
        **settings: Any,
    ) -> None:
        wait_passively()
        given = {"media_root": media_root, "media_domains": media_domains}
        own = own_names({**given, "limit_images": limit_images, "max_pixels": max_pixels, **settings})
        media = MediaPolicy.taken_from(own)
        config = RunConfig.of(None if model is None else str(model), **own)
        if model is None:
            sys.stderr.write(f"rosebatch: no model given: {DEMO_ANSWERS}\n")
        self._start(load_backend(config), config, seed, media)

    @classmethod
    def of(cls, launched: "Launched") -> "LLM":
        """Wrap an engine that is running already."""
        from rosebatch.llm.local import LocalBackend

        llm = cls.__new__(cls)
        llm._start(LocalBackend(launched), launched.plan.config)
        return llm

    def _start(
        self, backend: Backend, config: RunConfig, seed: int | None = None, media: MediaPolicy = NO_MEDIA
    ) -> None:
        self._backend: Backend | None = backend
        self._adapters = {name: folder for name, _, folder in (each.partition("=") for each in config.lora)}
        self._seed = seed
        # Of prompts without parameters.
        self._default = SamplingParams(**backend.sampling)
        self._numbers = count()
        self._calls = CallQueue(backend, media)
        self._awaited: dict[Shape, AwaitedCalls] = {}
        self._process = os.getpid()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one or several texts, lists of token ids, or mappings with ``prompt`` or ``prompt_token_ids``. A
                mapping may have images, too, and in its prompt a placeholder of the model for each of them:
                ``{"prompt": ..., "multi_modal_data": {"image": picture}}``. See ``chat`` for what an image may be.
            sampling_params: for all, or one for each; None is greedy, at most 512 tokens (with
                ``generation_config="auto"``: the model's own defaults).
            seed: base seed of the prompts that sample without a seed of their own. With it, the results depend on
                nothing else; without it, each call draws anew.
            on_error: whether a prompt that cannot be served raises, before anything runs if possible, or returns an
                output with its ``error``.
            use_tqdm: show progress on stderr.
            vllm: its other parameters, as long as they ask for nothing; and ``lora_request``, for all or one for each:
                a ``LoRARequest`` or the name of an adapter, see ``LLM(lora=...)``.

        Returns:
            one output for each prompt, in order.

        Raises:
            ValueError: with ``on_error="raise"``: a prompt cannot be served. It is named by its place, from 0.
        """
        lora = vllm.pop("lora_request", None)
        require_neutral("generate", vllm)
        with searched_rarely():
            given = map(prompt_fields, several(prompts))
            # No name holds the rows at the end of this block: the next search would look at all of their tokens.
            return self._served(self._rows(given, sampling_params, lora), COMPLETIONS, seed, on_error, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        seed: int | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Answer chats through the model's chat template.

        Args:
            messages: one conversation, or several. Parts of their content may be images:
                ``{"type": "image", "image": ...}``: a picture of Pillow, an array uint8 [height, width, 3], the bytes
                of a file, or a text as rows have it.
            sampling_params: as for ``generate``.
            add_generation_prompt: whether the template opens an answer.
            continue_final_message: whether the answer continues the last message.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            tools: that the model may call, as the chat API writes them.
            tool_choice: ``auto``, ``none``, ``required``, or the one to call, as the chat API writes it.
            parallel_tool_calls: whether an answer may have several calls.
            seed, on_error, use_tqdm, vllm: as for ``generate``.

        Returns:
            one output for each conversation, in order. The ``text`` of a completion is all of the answer; its
            ``message`` has reasoning and tool calls apart.

        Raises:
            ValueError: the tools cannot be used; with ``on_error="raise"``: a chat cannot be served.
        """
        lora = vllm.pop("lora_request", None)
        require_neutral("chat", vllm)
        chats = chats_fields(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        with searched_rarely():
            return self._served(self._rows(chats, sampling_params, lora), COMPLETIONS, seed, on_error, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **vllm: Any,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest completions of prompts.

        Args:
            prompts: as for ``generate``.
            params: of all prompts.
            use_tqdm: show progress on stderr.
            concurrency_limit: prompts that are searched at once; None for all. Beams that the KV cache has no room for
                are computed again at each step.
            vllm: its other parameters, as long as they ask for nothing.

        Returns:
            one output for each prompt, in order.

        Raises:
            ValueError: a prompt cannot be served, or the model has no tokenizer.
        """
        require_neutral("beam_search", vllm)
        given = list(several(prompts))
        if any(isinstance(each, Mapping) and each.get("multi_modal_data") for each in given):
            raise FlagError("beam_search takes no images")
        with Progress(len(given), enabled=use_tqdm) as progress:
            at_once = concurrency_limit or len(given)
            return beam_search(self.generate, given, params, self.get_tokenizer(), at_once, progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts.

        Args:
            prompts: as for ``generate``.
            pooling_params: for all, or one for each; None, and fields of None, leave it to the model.
            on_error, use_tqdm, vllm: as for ``generate``.

        Returns:
            one output for each prompt, in order.

        Raises:
            ValueError: with ``on_error="raise"``: a prompt cannot be served. It is named by its place, from 0.
        """
        require_neutral("embed", vllm)
        with searched_rarely():
            return self._served(self._embedded_rows(prompts, pooling_params), EMBEDDINGS, None, on_error, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classify prompts by the model's own head, after its activation.

        Args:
            prompts: as for ``generate``.
            on_error, use_tqdm, vllm: as for ``generate``.

        Returns:
            one output for each prompt, in order.

        Raises:
            ValueError: with ``on_error="raise"``: a prompt cannot be served, or the model has no such head.
        """
        require_neutral("classify", vllm)
        with searched_rarely():
            return self._served(self._pooled_rows(prompts, CLASSIFY), CLASSES, None, on_error, use_tqdm)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[ClassificationRequestOutput]:
        """The outputs of the model's own head, as they are; arguments as for ``classify``."""
        require_neutral("reward", vllm)
        with searched_rarely():
            return self._served(self._pooled_rows(prompts, _REWARD), REWARDS, None, on_error, use_tqdm)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Sequence[Any] | None = None,
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        **vllm: Any,
    ) -> list[ScoreRequestOutput] | list[ScoringRequestOutput]:
        """Score continuations of prompts, or the prompts themselves; by a cross-encoder, pairs of texts.

        Args:
            prompts: as for ``generate``.
            continuations: texts or lists of token ids, for all prompts; or a list of such lists, one for each. None
                scores each prompt, from its second token on. With a model that has a head for scores: one text for
                each of as many prompts, or several for one.
            on_error, use_tqdm, vllm: as for ``generate``.

        Returns:
            one output for each prompt, or for each pair, in order.

        Raises:
            ValueError: the continuations are none; with ``on_error="raise"``: a prompt cannot be served.
        """
        require_neutral("score", vllm)
        with searched_rarely():
            return self._served(*self._scored_rows(prompts, continuations), None, on_error, use_tqdm)

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        seed: int | None = None,
        on_error: OnError = "raise",
    ) -> Iterator[RequestOutput]:
        """Complete prompts as they come, from an input that need not end, in bounded memory.

        The input is read on a thread, somewhat ahead. Results come as they are ready; ``request_id`` counts the prompts
        of this model. Closing the iterator drops what is unfinished.

        Args:
            prompts: as for ``generate``.
            sampling_params: for all, or an iterable with one for each.
            seed, on_error: as for ``generate``.
        """
        shared = sampling_params is None or isinstance(sampling_params, SamplingParams)
        if shared:
            pairs: Iterable[tuple[Prompt, Any]] = ((prompt, sampling_params) for prompt in several(prompts))
        else:
            pairs = zip(several(prompts), sampling_params, strict=True)  # type: ignore[arg-type]
        check_on_error(on_error)
        backend = self._running()
        rows: Iterator[Row | FailedRow | None]
        rows = (self._row(prompt_fields(prompt), params or self._default) for prompt, params in pairs)
        if backend.joins:
            rows = on_thread(rows, _MAX_WAITING, 0, "rosebatch-stream", _weight)
        with closing(self._calls.outputs(Call(rows, COMPLETIONS, seed))) as outputs:
            for found in outputs:
                for place, output in found:
                    yield checked(output, on_error, place)
                    # The caller may have closed it meanwhile.
                    self._running()

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        **vllm: Any,
    ) -> list[RequestOutput]:
        """``generate`` for coroutines. Prompts of all calls under way run together."""
        lora = vllm.pop("lora_request", None)
        require_neutral("agenerate", vllm)
        rows = self._rows(map(prompt_fields, several(prompts)), sampling_params, lora)
        return await self._await(rows, COMPLETIONS, on_error)

    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        **chat: Any,
    ) -> list[RequestOutput]:
        """``chat`` for coroutines, with the same parameters of chats."""
        lora = chat.pop("lora_request", None)
        rows = self._rows(chats_fields(messages, **chat), sampling_params, lora)
        return await self._await(rows, COMPLETIONS, on_error)

    async def aembed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        on_error: OnError = "raise",
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """``embed`` for coroutines. Prompts of all calls under way run together."""
        require_neutral("aembed", vllm)
        return await self._await(self._embedded_rows(prompts, pooling_params), EMBEDDINGS, on_error)

    async def aclassify(
        self, prompts: Prompt | Sequence[Prompt], *, on_error: OnError = "raise", **vllm: Any
    ) -> list[ClassificationRequestOutput]:
        """``classify`` for coroutines."""
        require_neutral("aclassify", vllm)
        return await self._await(self._pooled_rows(prompts, CLASSIFY), CLASSES, on_error)

    async def areward(
        self, prompts: Prompt | Sequence[Prompt], *, on_error: OnError = "raise", **vllm: Any
    ) -> list[ClassificationRequestOutput]:
        """``reward`` for coroutines."""
        require_neutral("areward", vllm)
        return await self._await(self._pooled_rows(prompts, _REWARD), REWARDS, on_error)

    async def ascore(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Sequence[Any] | None = None,
        *,
        on_error: OnError = "raise",
        **vllm: Any,
    ) -> list[ScoreRequestOutput] | list[ScoringRequestOutput]:
        """``score`` for coroutines."""
        require_neutral("ascore", vllm)
        return await self._await(*self._scored_rows(prompts, continuations), on_error)

    async def _await(self, rows: Sequence[Row | FailedRow], shape: Shape, on_error: OnError) -> list[Any]:
        """The outputs of rows, in order. Rows of all coroutines whose outputs have this shape run as one stream."""
        check_on_error(on_error)
        self._running()
        calls = self._awaited.setdefault(shape, AwaitedCalls(self._calls, shape, self._running))
        outputs = await calls.outputs(rows)
        return [checked(output, on_error, place) for place, output in enumerate(outputs)]

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of prompts without parameters. They cannot be changed: use ``dataclasses.replace``."""
        return self._default

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model, for scripts that want one.

        Raises:
            ValueError: the model has none.
        """
        folder = self._running().tokenizer_folder
        if folder is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids")
        return load_pretrained_tokenizer(folder)

    @contextmanager
    def exclusive(self) -> Iterator["Launched"]:
        """The engine, which nobody else uses meanwhile.

        Raises:
            RuntimeError: it is in use, closed, or in other processes.
        """
        backend = self._running()
        with self._calls.alone():
            yield launched_of(backend)

    @contextmanager
    def service(self) -> Iterator[Service]:
        """The model as one that serves the rows of a job. Nobody else uses it meanwhile.

        Raises:
            RuntimeError: it is in use, or closed.
        """
        backend = self._running()
        with self._calls.alone(), backend.service() as service:
            yield service

    def close(self) -> None:
        """Give the memory back, and end the worker processes; the model cannot be used any more."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def plan(self) -> "LaunchPlan":
        """What was decided when the model was loaded: device, dtype, switches, source.

        Raises:
            RuntimeError: that was in other processes.
        """
        return launched_of(self._running()).plan

    def _running(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("this LLM is closed")
        if os.getpid() != self._process:
            # Neither its threads nor its connections are in a forked process.
            raise RuntimeError("this LLM belongs to the process that made it: make one in this process")
        return self._backend

    def _rows(
        self,
        prompts: Iterable[Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Any = None,
    ) -> list[Row | FailedRow]:
        prompts = list(prompts)
        params = one_for_each("sampling_params", sampling_params, self._default, len(prompts))
        if lora_request is not None:
            names = names_of(lora_request, len(prompts), self._adapters)
            prompts = [{"lora": name, **prompt} for name, prompt in zip(names, prompts, strict=True)]
        return [self._row(prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    def _pooled_rows(
        self, prompts: Prompt | Sequence[Prompt] | None, pooling_params: PoolingParams | Sequence[PoolingParams] | None
    ) -> list[Row | FailedRow]:
        given = several(prompts)
        params = one_for_each("pooling_params", pooling_params, PoolingParams(), len(given))
        return [self._row({**prompt_fields(p), "pooling": own}, GREEDY) for p, own in zip(given, params, strict=True)]

    def _embedded_rows(
        self, prompts: Prompt | Sequence[Prompt] | None, pooling_params: PoolingParams | Sequence[PoolingParams] | None
    ) -> list[Row | FailedRow]:
        rows = self._pooled_rows(prompts, pooling_params)
        for row in rows:
            if isinstance(row, Row) and row.pooling is not None:
                row.pooling.require_vector()
        return rows

    def _scored_rows(
        self, prompts: Prompt | Sequence[Prompt], continuations: Sequence[Any] | None
    ) -> tuple[list[Row | FailedRow], Shape]:
        """Pairs of texts for a model with a head for scores, else continuations; and the shape of their outputs."""
        if self._running().classifies:
            pairs = text_pairs(prompts, continuations)
            return [self._row({"pairs": (pair,), "pooling": SCORE}, GREEDY) for pair in pairs], PAIRS
        fields = list(map(prompt_fields, several(prompts)))
        wanted = continuations_of(fields, continuations)
        return [self._row({**p, "continuations": own}, GREEDY) for p, own in zip(fields, wanted, strict=True)], SCORES

    def _served(
        self, rows: Sequence[Row | FailedRow], shape: Shape, seed: int | None, on_error: OnError, use_tqdm: bool
    ) -> list[Any]:
        """The outputs of rows, in order."""
        check_on_error(on_error)
        bad = next(((n, row) for n, row in enumerate(rows) if isinstance(row, FailedRow)), None)
        if not self._running().joins and bad is not None and on_error == "raise":
            # Workers would name whichever they come to first.
            raise FlagError(f"prompt {bad[0]}: {bad[1].error.message}")
        outputs: list[Any] = [None] * len(rows)
        with (
            Progress(len(rows), enabled=use_tqdm) as progress,
            closing(self._calls.outputs(Call(rows, shape, seed, progress=progress))) as batches,
        ):
            for found in batches:
                self._running()
                for place, output in found:
                    outputs[place] = output if output.error is None else checked(output, on_error, place)
                if use_tqdm:
                    tokens = sum([output.num_generated_tokens for _, output in found])
                    progress.advance(len(found), tokens=tokens, failed=sum([o.error is not None for _, o in found]))
        return outputs

    def _row(self, prompt: Mapping[str, Any], sampling: SamplingParams) -> Row | FailedRow:
        """A prompt as the job's rows are, numbered in the order of all calls."""
        index = next(self._numbers)
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(sampling).__name__}")
        where = f"prompt {index}"
        if isinstance(error := prompt.get("error"), RowError):
            return FailedRow(index=index, where=where, metadata={}, error=error)
        if self._seed and sampling.seed is None and not sampling.greedy:
            sampling = sampling.seeded(row_seed(None, index, self._seed, ()))
        if sampling.max_tokens == 0:
            # The engine always generates a token, which is dropped.
            sampling, prompt = replace(sampling, max_tokens=1), {**prompt, "prompt_only": True}
        pooling = prompt.get("pooling")
        if pooling is not None and not isinstance(pooling, PoolingParams):
            raise ValueError(f"pooling_params must be PoolingParams, got {type(pooling).__name__}")
        return Row(index=index, where=where, metadata={}, sampling=sampling, **prompt)
