"""A backend of lm-evaluation-harness: ``lm_eval --model rosebatch``.

``python -m rosebatch.llm.harness …`` is the command ``lm_eval`` for versions that do not look for backends of other
packages. Texts become tokens, windows and texts again as the harness's own backend ``hf`` does it, so that the results
are the same.
"""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rosebatch.core.errors import FlagError, UserError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.words import quoted
from rosebatch.host.pretrained import load_pretrained_tokenizer
from rosebatch.io.tasks.score import MAX_CONTINUATIONS
from rosebatch.llm.llm import LLM
from rosebatch.llm.scores import ScoreRequestOutput

# Texts of a request, for the harness's cache; tokens of the context; tokens of the continuation.
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
# Of arguments that no setting of ``LLM`` checks.
_TYPES = {
    "max_length": int, "max_gen_toks": int, "prefix_token_id": int,
    "add_bos_token": bool, "enable_thinking": bool, "chat_template_args": dict,
}  # fmt: skip


@register_model("rosebatch")
class RosebatchLM(TemplateLM):  # type: ignore[misc]
    """A model as the harness sees it. All requests of a kind are one call of ``LLM``, which makes the batches.

    Args:
        pretrained: what ``LLM`` takes, or an ``LLM``; None for the demo model.
        max_length: most tokens of a window, and of a prompt with its completion; None for the model's own limit.
        max_gen_toks: most tokens of a completion whose task does not say.
        add_bos_token: whether texts begin with the BOS token; None leaves it to the tokenizer.
        prefix_token_id: stands before a text without a context; None for BOS, or else EOS.
        think_end_token: what ends the reasoning, a text or a token id; the answer comes after it.
        enable_thinking: variable of the chat template; None does not set it.
        chat_template_args: further ones.
        device: as for ``LLM``. ``cuda:0``, the default of the command, is a GPU if there is one, as for ``hf``.
        batch_size, max_batch_size: change nothing.
        settings: of ``LLM``. ``generation_config`` is ``auto``, because the backend ``hf`` takes penalties from there.

    Raises:
        FlagError: a setting does not exist, or its value is impossible.
        UserError: the model is missing or unreadable.
    """

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "RosebatchLM":
        """From ``--model_args`` and other flags. The former win: ``--device`` has a value where nobody gives it."""
        return cls(**{**(additional_config or {}), **arg_dict})

    def __init__(
        self,
        pretrained: str | LLM | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        for name, kind in _TYPES.items():
            if (value := locals()[name]) is not None and type(value) is not kind:
                raise FlagError(f"{name} must be of type {kind.__name__}, got {quoted(value)}")
        if not isinstance(pretrained, LLM):
            max_length = max_length or settings.pop("max_model_len", None)
            if max_length is None and settings.get("data_parallel_size", 1) != 1:
                raise FlagError("data_parallel_size needs max_length, for the model is in other processes")
            settings = {"generation_config": "auto", "max_model_len": max_length, **settings}
            try:
                pretrained = LLM(pretrained, device=None if device == "cuda:0" else device, **settings)
            except ValueError as error:
                raise FlagError(str(error)) from error
        self.llm = pretrained
        self.max_length = max_length or self.llm.plan.source.config.max_model_len
        self.max_gen_toks = max_gen_toks
        self.tokenizer = self.llm.get_tokenizer()
        if add_bos_token is not None:
            self.tokenizer = load_pretrained_tokenizer(Path(self.tokenizer.name_or_path), add_bos_token=add_bos_token)
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.think_end_token = think_end_token
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int | None:
        """What ends a text."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        for token in (self.custom_prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return int(token)
        raise FlagError("the tokenizer names no BOS and no EOS token: give prefix_token_id")

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Encode a text. Special tokens are not added before a text that begins with the prefix already."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        encoded: list[int] = self.tokenizer.encode(string, **options)
        return encoded

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat; without its system messages, where the template refuses them."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self.chat_template_args,
        }
        try:
            text: str = self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.apply_chat_template(others, **options)
        return text

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, by windows as long as the model allows."""
        windows = [self._windows(*request.args) for request in requests]
        found = iter(self._loglikelihood_tokens([each for own in windows for each in own], disable_tqdm))
        totals = []
        for request, own in zip(requests, windows, strict=True):
            totals.append(sum(logprob for logprob, _ in islice(found, len(own))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _windows(self, text: str) -> list[TokenRequest]:
        pairs = get_rolling_token_windows(
            self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        return [(None, *make_disjoint_window(pair)) for pair in pairs]

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation its log-probability, and whether greedy decoding would write it."""
        # Those that differ in their last token at most share a pass, and so a prompt.
        shared: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            kept = context[-(self.max_length + 1 - len(continuation)) :]
            shared.setdefault((tuple(kept), tuple(continuation[:-1])), []).append(number)
        rows = [
            (context, numbers[first : first + MAX_CONTINUATIONS])
            for (context, _), numbers in shared.items()
            for first in range(0, len(numbers), MAX_CONTINUATIONS)
        ]
        outputs = self.llm.score(
            [context for context, _ in rows],
            [[requests[number][2] for number in numbers] for _, numbers in rows],
            use_tqdm=not disable_tqdm,
        )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for (_, numbers), output in zip(rows, outputs, strict=True):
            assert isinstance(output, ScoreRequestOutput), "it is of continuations"
            for number, score in zip(numbers, output.scores, strict=True):
                answers[number] = score.logprob, score.is_greedy
                texts, _, _ = requests[number]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Complete prompts, up to the first of their stop strings."""
        asked = [self._asked(*request.args) for request in requests]
        prompts, sampling = [prompt for prompt, _ in asked], [params for _, params in asked]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=not disable_tqdm)
        texts = []
        for request, params, output in zip(requests, sampling, outputs, strict=True):
            texts.append(self._answer(output.outputs[0].token_ids, params.stop))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _asked(self, context: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """The prompt of a request, without its start where it is too long, and how it is completed."""
        try:
            params = self._sampling(gen_kwargs)
        except (TypeError, ValueError) as error:
            # It names the field.
            raise FlagError(f"generation_kwargs: {error}") from error
        room = self.max_length - params.max_tokens
        if room < 1:
            told = f"max_gen_toks {params.max_tokens} leave no room for a prompt: max_length is {self.max_length}"
            raise FlagError(told)
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return prompt[-room:], params

    def _sampling(self, gen_kwargs: dict[str, Any]) -> SamplingParams:
        given = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = handle_stop_sequences(given.pop("until"), end)
        if not given.pop("do_sample"):
            given["temperature"] = 0.0
        if given.get("num_beams") == 1:
            del given["num_beams"]
        # Stop strings may be special tokens.
        fixed = {
            "max_tokens": given.pop("max_gen_toks"),
            "stop": tuple(filter(None, until)),
            "skip_special_tokens": False,
        }
        return SamplingParams(**{**self.llm.get_default_sampling_params().given(), **given, **fixed})

    def _answer(self, token_ids: list[int], until: Sequence[str]) -> str:
        """The text of tokens: after the reasoning, without special tokens, up to the first stop string."""
        end = self.think_end_token
        if isinstance(end, int) and end in token_ids:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        if isinstance(end, int):
            text = text.lstrip()
        answer: str = postprocess_generated_text(text, list(until), end if isinstance(end, str) else None)
        return answer


def main() -> None:
    """The command ``lm_eval``. A mistake of a user is one line on stderr, never a traceback."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        sys.stderr.write(f"rosebatch: error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
