"""The least time that a workload can take on a device: its floor, from two rates measured on the device.

Memory bounds decode: every step reads each weight once and the K and V of each live sequence once. Of the routed
experts it reads those that the live tokens reach on average if all experts are equally popular. Arithmetic bounds
prefill: its matrix and attention products run at the rate of a large bf16 product. In the last layer, only the last
token of a prompt goes further than its K and V. Nothing else counts, so no engine reaches 100 %.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from rosebatch.config.model import ModelConfig
from rosebatch.model.registry import FAMILIES
from rosebatch.ops.layout import MatrixBytes

_HOST_COPY = 2**27
_HOST_MATRIX = 1024
_HOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does at best, per second: bytes copied, matrix operations in bf16 (on a CPU in the run's dtype)."""

    copy: float
    matmul: float

    @property
    def fp8(self) -> float:
        """Matrix operations in fp8. Not measured: twice those in bf16, as in the data sheets of GPUs."""
        return 2 * self.matmul

    def of(self, devices: int) -> "Rates":
        """The rates of several devices together, which share all work and never wait for each other."""
        return Rates(self.copy * devices, self.matmul * devices)


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of a workload."""

    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        """Both together: one follows the other."""
        return self.prefill_s + self.decode_s


def measure_rates(device: str) -> Rates | None:
    """Measure this GPU, once in a process; None on ``cpu``."""
    if device != "cuda":
        return None
    from rosebatch_kernels.common.timing import copy_bandwidth, matmul_rate

    return Rates(copy=copy_bandwidth(), matmul=matmul_rate())


def measure_host_rates(dtype: torch.dtype) -> Rates:
    """Measure this CPU in the dtype of a run; takes a fraction of a second."""
    source = torch.empty(_HOST_COPY, dtype=torch.uint8)
    target = torch.empty_like(source)
    matrix = torch.randn(_HOST_MATRIX, _HOST_MATRIX).to(dtype)
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(_HOST_REPEATS))
    product = min(_seconds(lambda: matrix @ matrix) for _ in range(_HOST_REPEATS))
    return Rates(copy=2 * _HOST_COPY / copy, matmul=2 * _HOST_MATRIX**3 / product)


def weight_bytes(config: ModelConfig, itemsize: int, kept: MatrixBytes | None = None) -> int:
    """Bytes of a model's matrices; ``kept`` says what those of layers take, None that they are plain."""
    rows = config.num_token_ids + config.vocab_size * (config.head and not config.tie_word_embeddings)
    embedding = rows * config.hidden_size
    if inputs := config.layer_inputs:
        embedding += inputs.vocab_size * config.num_layers * inputs.size
    if config.transformers is not None:
        return (config.transformers.layer_weights + embedding) * itemsize
    experts = config.experts.num_experts if config.experts else 0
    return int(_bytes_read(config, experts, kept or MatrixBytes(itemsize, itemsize))) + embedding * itemsize


def decode_bytes(config: ModelConfig, itemsize: int, rows: int, kept: MatrixBytes | None = None) -> int:
    """Bytes of matrices that a decode step of so many rows reads; ``kept`` as for ``weight_bytes``."""
    kept = kept or MatrixBytes(itemsize, itemsize)
    return int(_bytes_read(config, _reached(config, rows), kept)) + config.vocab_size * config.hidden_size * itemsize


def find_floor(
    config: ModelConfig,
    itemsize: int,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    max_num_seqs: int,
    rates: Rates,
    cached_prefix: int = 0,
    kept: MatrixBytes | None = None,
) -> Floor:
    """The floor of a workload.

    It is too high for a model that skips values without weight. Queries see all keys before them, or those in
    their layer's sliding window.

    Args:
        config: the model's.
        itemsize: bytes of a weight, and of a K/V element that is not stored as e4m3.
        prompt_lens: tokens of each prompt, the shared prefix included.
        output_lens: tokens generated for each; prefill yields the first. 0 for a prompt that is pooled.
        max_num_seqs: how many run at once; the others follow, the longest first.
        rates: the device's.
        cached_prefix: shared first tokens of all prompts, computed once and read once a step.
        kept: bytes of a weight in the layers' matrices; None: they are plain.
    """
    own_lens = [length - cached_prefix for length in prompt_lens]
    # No decode step follows either of them.
    output_lens = [max(1, length) for length in output_lens]
    chosen = config.experts.experts_per_token if config.experts else 0
    layers, head = _parameters(config, chosen), config.vocab_size * config.hidden_size * config.head
    kept = kept or MatrixBytes(itemsize, itemsize)

    tokens = cached_prefix + sum(own_lens)
    # All tokens of a prompt may see each other: then the last layer computes all of them.
    last = 0 if config.bidirectional else _after_keys(config, chosen)
    of_layers, of_head = (layers - last) * tokens + last * len(prompt_lens), head * len(prompt_lens)
    live = _live_sequences(output_lens, max_num_seqs)
    steps = live.total()
    longest = max((n + o for n, o in zip(own_lens, output_lens, strict=True)), default=0)
    attention = key_bytes = 0
    if last:
        # In place of all queries of the last layers, those of the last tokens.
        for window in map(config.sliding_window, _last_layers(config)):
            pairs = sum(min(n, window or n) for n in prompt_lens) - _pairs(prompt_lens, cached_prefix, window)
            attention += pairs * _pair_operations(config, window)
    if config.bidirectional:
        reaches = [2 * config.sliding_window(layer) - 1 for layer in range(config.num_layers)]
        pairs = sum(n * (min(n, reach) if reach > 0 else n) for reach in reaches for n in prompt_lens)
        attention = pairs * _pair_operations(config, 0)
    for window, count in () if config.bidirectional else _windows(config).items():
        attention += count * _pairs(prompt_lens, cached_prefix, window) * _pair_operations(config, window)
        # The step after k generated tokens reads their K and V and the prompt's. A window moves past the prefix.
        prefix_keys = min(cached_prefix, max(window - longest, 0)) if window else cached_prefix
        own_keys = sum(_seen(n + o - 1, window) - _seen(n, window) for n, o in zip(own_lens, output_lens, strict=True))
        key_bytes += count * (prefix_keys * steps + own_keys) * _key_bytes(config, window, itemsize)
    weights = sum(n * (_bytes_read(config, _reached(config, rows), kept) + head * itemsize) for rows, n in live.items())
    read = weights + key_bytes
    rule = config.delta or config.mamba
    if rule:
        # A decode step reads and writes each sequence's state.
        read += 2 * config.num_state_layers * rule.memory_bytes * sum(length - 1 for length in output_lens)
    prefill_s = (2 * of_head + attention) / rates.matmul + 2 * of_layers / (rates.fp8 if kept.fp8 else rates.matmul)
    return Floor(prefill_s=prefill_s, decode_s=read / rates.copy)


def _bytes_read(config: ModelConfig, num_experts: float, kept: MatrixBytes) -> float:
    """Bytes of the layers' matrices with this number of routed experts."""
    of_all = _parameters(config, 0)
    return of_all * kept.layers + (_parameters(config, num_experts) - of_all) * kept.experts


def _key_bytes(config: ModelConfig, window: int, itemsize: int) -> int:
    """Bytes of a token's K and V in a layer with this window; e4m3 has a scale of 4 bytes for each head."""
    if config.latent:
        return (config.latent.rank + config.rotary_dim) * itemsize
    own = config.of_window(window)
    head = own.head_dim + 4 if config.stores_e4m3(window) else own.head_dim * itemsize
    return 2 * own.num_kv_heads * head


def _pair_operations(config: ModelConfig, window: int) -> int:
    """Operations of a query and a key that it sees, of all heads of a layer with this window."""
    own = config.of_window(window)
    return 2 * own.num_heads * (own.head_dim + _value_dim(own))


def _parameters(config: ModelConfig, num_experts: float) -> float:
    """Weights of the layers' matrices with this number of routed experts. Norms and biases are too few to count."""
    if config.transformers is not None:
        return config.transformers.active_weights
    each = _windows(config).items()
    columns: float = sum(count * _attention_columns(config.of_window(window)) for window, count in each)
    if config.shared_kv:
        shared = range(config.num_layers - config.shared_kv.layers, config.num_layers)
        columns -= sum(_key_columns(config.of_layer(layer)) for layer in shared)
    if config.layer_inputs:
        # Those of a projection, and of two for each layer.
        columns += 3 * config.num_layers * config.layer_inputs.size
    if config.delta:
        delta = config.delta
        columns += config.num_state_layers * (delta.projected + delta.within / config.hidden_size)
    if config.mamba:
        columns += config.num_state_layers * (config.mamba.projected + config.mamba.inner)
    if config.conv:
        columns += config.num_state_layers * 4 * config.hidden_size
    matrices = FAMILIES[config.family].mlp_matrices
    dense = sum(config.mlp_layers) if config.mlp_layers else config.num_layers
    if config.experts:
        experts, routed = config.experts, sum(config.experts.layers)
        inner = num_experts * experts.expert_size + experts.shared_size
        columns += routed * (matrices * inner + experts.num_experts + experts.shared_gate)
        dense -= routed * (not experts.beside_mlp)
    if config.shared_kv and config.shared_kv.wide_mlp:
        dense += config.shared_kv.layers
    return config.hidden_size * (columns + dense * matrices * config.intermediate_size)


def _windows(config: ModelConfig) -> Counter[int]:
    """How many layers with attention have each sliding window, those that share K and V included."""
    return Counter(config.sliding_window(layer) for layer, own in enumerate(config.attends) if own)


def _last_layers(config: ModelConfig) -> range:
    """Those after whose K and V a prompt's last token goes on alone: one, and those that share K and V."""
    return range(config.num_layers - 1 - (config.shared_kv.layers if config.shared_kv else 0), config.num_layers)


def _key_columns(config: ModelConfig) -> int:
    """Of them, those that make K and V, or the latent."""
    return config.latent.rank + config.rotary_dim if config.latent else 2 * config.num_kv_heads * config.head_dim


def _attention_columns(config: ModelConfig) -> float:
    """Weights of a layer's attention, by channels of the hidden state."""
    latent = config.latent
    if latent is None:
        queries = config.num_heads * FAMILIES[config.family].attention_matrices
        return (queries + 2 * config.num_kv_heads) * config.head_dim
    q_size, nope_dim = config.num_heads * config.head_dim, config.head_dim - config.rotary_dim
    within = latent.q_rank * q_size + latent.rank * config.num_heads * (nope_dim + latent.value_dim)
    columns = (latent.q_rank or q_size) + latent.rank + config.rotary_dim + config.num_heads * latent.value_dim
    return columns + within / config.hidden_size


def _value_dim(config: ModelConfig) -> int:
    """Channels of a head's values."""
    return config.latent.value_dim if config.latent else config.head_dim


def _after_keys(config: ModelConfig, num_experts: float) -> float:
    """Weights of the last layers that do not make K and V; 0 where they are unknown, or one has no attention alone."""
    if config.transformers is not None or config.state_layers[-1] or config.attention_layers:
        return 0
    columns, experts = 0.0, config.experts
    matrices = FAMILIES[config.family].mlp_matrices
    for layer in _last_layers(config):
        own, routes = config.of_layer(layer), experts is not None and experts.layers[layer]
        columns += _attention_columns(own) - _key_columns(own)
        if experts is not None and routes:
            inner = num_experts * experts.expert_size + experts.shared_size
            columns += matrices * inner + experts.num_experts + experts.shared_gate
        if experts is None or not routes or experts.beside_mlp:
            columns += matrices * config.inner_size(layer)
        columns += 2 * config.layer_inputs.size if config.layer_inputs else 0
    return config.hidden_size * columns


def _reached(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that these tokens reach on average, if all experts are equally popular."""
    if config.experts is None:
        return 0
    share = config.experts.experts_per_token / config.experts.num_experts
    return config.experts.num_experts * (1 - (1 - share) ** tokens)


def _live_sequences(output_lens: Sequence[int], max_num_seqs: int) -> Counter[int]:
    """Number of decode steps by their number of live sequences: each step makes one token for every live one.

    The longest begin first, which leaves the fewest steps with empty slots.
    """
    free_at = [0] * max_num_seqs
    changes: Counter[int] = Counter()
    for length in sorted(output_lens, reverse=True):
        start = heapq.heapreplace(free_at, free_at[0] + length - 1)
        changes[start] += 1
        changes[start + length - 1] -= 1
    times = sorted(changes)
    live = accumulate(changes[time] for time in times)
    steps: Counter[int] = Counter()
    for (start, end), count in zip(pairwise(times), live, strict=False):
        steps[count] += end - start
    return steps


def _pairs(prompt_lens: Sequence[int], cached_prefix: int, window: int) -> int:
    """Queries and the keys that they see in a layer, the prefix's counted once."""
    of_prefix = _seen(cached_prefix, window)
    return of_prefix + sum(_seen(n, window) - of_prefix for n in prompt_lens)


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _seen(queries: int, window: int) -> int:
    """Keys that the first ``queries`` of a sequence see together: 1 + 2 + … + queries without a window."""
    inside = min(queries, window or queries)
    return inside * (inside + 1) // 2 + (queries - inside) * window
