"""The floor of a workload: against figures from the design, and by hand for small numbers."""

import msgspec
import pytest

from rosebatch.bench.scenario import configs_dir, load_scenarios
from rosebatch.bench.workload import make_workload
from rosebatch.config.gated_delta import DeltaConfig
from rosebatch.config.mamba2 import MambaConfig
from rosebatch.config.model import ExpertsConfig, ModelConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.engine.metrics.roofline import Floor, Rates, find_floor, measure_rates
from rosebatch.ops.layout import MatrixBytes
from tests.helpers.model_configs import small_config

H100 = Rates(copy=3.0e12, matmul=798e12)
TINY = {"vocab_size": 10, "hidden_size": 8, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
TINY |= {"head_dim": 5, "intermediate_size": 7, "max_model_len": 100}
# q and o: 8 x 20, k and v: 8 x 10, MLP: 8 x 7.
LAYERS, HEAD, TOKEN = 3 * (2 * 160 + 2 * 80 + 3 * 56), 80, 2 * 3 * 2 * 5 * 2
# What the last layer does with the last token of a prompt alone; and operations of a query with a key in a layer.
LAST, PAIR = 2 * 160 + 3 * 56, 4 * 4 * 5


def floor_of(prompt_lens, output_lens, seqs=10, itemsize=2, cached_prefix=0, kept=None, **fields):
    config = small_config(**{**TINY, **fields})
    rates = Rates(copy=1.0, matmul=1.0)
    options = {"max_num_seqs": seqs, "rates": rates, "cached_prefix": cached_prefix, "kept": kept}
    return find_floor(config, itemsize, prompt_lens, output_lens, **options)


@pytest.mark.parametrize(
    ("name", "tokens_per_s"),
    [
        ("gpt2-sampled", 120e3),
        ("qwen3-mixed", 25.6e3),
        ("qwen3-greedy", 35.9e3),
        ("llama-8b-short", 8.7e3),
        ("decode_heavy_b32", 32 * 256 / 0.163),
        ("large_batch_short_b128", 128 * 64 / 0.057),
        ("balanced_b32", 32 * 128 / 0.109),
        ("long_decode_b32", 32 * 256 / 0.497),
    ],
)
def test_known_floors(name, tokens_per_s):
    """Output tokens/s on an H100, calculated before this code was written."""
    (chosen,) = load_scenarios([name])
    scenario = chosen.scenario
    config = load_toml(configs_dir() / "models" / f"{scenario.model}.toml", ModelConfig)
    workload = make_workload(scenario, config.vocab_size)
    lengths = workload.prompt_lens, workload.output_lens
    floor = find_floor(config, 2, *lengths, max_num_seqs=scenario.max_num_seqs, rates=H100)
    assert sum(workload.output_lens) / floor.seconds == pytest.approx(tokens_per_s, rel=0.03)


def test_one_token_each_is_prefill_alone():
    """No decode step reads anything, and the last layer has one query of each prompt."""
    pairs = 2 * (3 * 4 // 2 + 1) + 3 + 1
    floor = floor_of([3, 1], [1, 1])
    products = 2 * (LAYERS - LAST) * 4 + 2 * (LAST + HEAD) * 2
    assert floor == Floor(prefill_s=products + PAIR * pairs, decode_s=0)
    assert floor.seconds == floor.prefill_s


def test_decode_by_hand():
    """Two sequences of 3 and 1 prompt tokens; the second ends one step earlier."""
    keys = (4 + 5) + 2
    assert floor_of([3, 1], [3, 2]).decode_s == 2 * (LAYERS + HEAD) * 2 + keys * TOKEN
    assert floor_of([3, 1], [3, 2], itemsize=4).decode_s == 2 * floor_of([3, 1], [3, 2]).decode_s


def test_the_embedding_is_read_only_as_output_projection():
    """Decode reads it once, tied or not."""
    assert floor_of([3], [4], tie_word_embeddings=True) == floor_of([3], [4])


def test_the_mlp_of_gpt2_has_two_matrices():
    """Counting a gate would be one matrix too many."""
    less = 3 * 56 * 2
    assert floor_of([3], [2], family="gpt2").decode_s == floor_of([3], [2]).decode_s - less


@pytest.mark.parametrize(
    ("output_lens", "seqs", "steps"),
    [([5, 5], 1, 8), ([5, 5], 2, 4), ([5, 3, 3, 5], 2, 6), ([2, 5, 3], 2, 4), ([1, 1, 1], 1, 0), ([9], 4, 8)],
)
def test_steps(output_lens, seqs, steps):
    """A free place is taken at once, the longest first: in another order, a job was faster than its floor."""
    few, many = (floor_of([1] * len(output_lens), output_lens, seqs=limit).decode_s for limit in (seqs, 100))
    assert few - many == (steps - (max(output_lens) - 1)) * 2 * (LAYERS + HEAD)


def test_a_cached_prefix_counts_once():
    """It is computed for the first prompt only, and read once in every step for all sequences."""
    apart, shared = floor_of([7, 8], [3, 3]), floor_of([7, 8], [3, 3], cached_prefix=5)
    assert apart.prefill_s - shared.prefill_s == 2 * (LAYERS - LAST) * 5 + 2 * PAIR * (5 * 6 // 2)
    assert apart.decode_s - shared.decode_s == 2 * 5 * TOKEN


def test_a_window_bounds_what_is_read_and_multiplied():
    """Counting all keys of a long sequence would put a model with windows above its floor."""
    whole = floor_of([9], [4])
    one_slides = floor_of([9], [4], sliding_windows=(0, 4, 0))
    # Prefill: 1 + 2 + 3 + 6 * 4 pairs instead of 45; decode: 3 * 4 keys instead of 10 + 11 + 12.
    assert whole.prefill_s - one_slides.prefill_s == 4 * 4 * 5 * (45 - 30)
    assert whole.decode_s - one_slides.decode_s == TOKEN // 3 * (33 - 12)
    assert floor_of([9], [4], sliding_windows=(0, 40, 0)) == whole


def test_the_last_query_of_a_prompt_sees_its_window():
    """All keys, in a last layer with a window, would be a floor that such a model can beat."""
    whole, slides = floor_of([9, 2], [1, 1]), floor_of([9, 2], [1, 1], sliding_windows=(0, 0, 4))
    assert whole.prefill_s - slides.prefill_s == PAIR * (9 - 4)


def test_a_window_may_leave_the_cached_prefix_behind():
    """Only what every step's window reaches of the prefix counts."""
    narrow, wide = (floor_of([9], [4], cached_prefix=5, sliding_windows=(w,) * 3) for w in (4, 100))
    assert narrow.decode_s == 3 * 2 * (LAYERS + HEAD) + TOKEN * 3 * 4
    assert wide == floor_of([9], [4], cached_prefix=5)


def test_no_floor_on_a_cpu():
    """A CPU's rates depend too much on threads and caches."""
    assert measure_rates("cpu") is None


def test_states_are_read_and_written_by_each_step():
    """Two of three layers keep a state of 3 x 4 x 6 numbers in fp32 in place of K and V; the third has a gate."""
    delta = DeltaConfig(layers=(True, True, False), key_heads=1, value_heads=3, key_dim=4, value_dim=6)
    floor = floor_of([5], [4], family="qwen3_5", delta=delta)
    # Of each layer with the rule: q and k of 4, v, gate and out of 18, a and b of 3. Of the other: q, gate and o of 20.
    layers = 2 * 8 * (2 * 4 + 3 * 18 + 2 * 3) + 8 * (3 * 20 + 2 * 10) + 3 * 8 * 3 * 7
    keys = 5 + 1 + 5 + 2 + 5 + 3
    states = 2 * 2 * 3 * 4 * 6 * 4
    assert floor.decode_s == 3 * ((layers + HEAD) * 2 + states) + keys * (TOKEN // 3)
    channels = msgspec.structs.replace(delta, by_channel=True)
    # The gate of 18 and a of 3 are made of 6 and 4.
    own = floor_of([5], [4], family="qwen3_5", delta=channels)
    assert own.decode_s - floor.decode_s == 3 * 2 * 2 * (8 * (6 + 4 - 18 - 3) + 3 * (6 * 6 + 4 * 4))
    plain = floor_of([5], [4], family="olmo_hybrid", delta=delta)
    assert floor.decode_s - plain.decode_s == 3 * 2 * 8 * 20


def test_layers_of_one_sub_layer_each():
    """Mamba2, attention, an MLP without a gate: not an MLP in each, nor K and V in each that keeps no state."""
    mamba = MambaConfig(layers=(True, False, False), heads=2, head_dim=3, groups=1, state_size=4)
    kinds = {"attention_layers": (False, True, False), "mlp_layers": (False, False, True)}
    floor = floor_of([5], [4], family="nemotron_h", activation="relu2", mamba=mamba, **kinds)
    # Columns of Mamba2: gate, x and out of 6, B and C of 4, 2 steps. Of attention: q and o of 20, k and v of 10.
    layers = 8 * ((3 * 6 + 2 * 4 + 2) + (2 * 20 + 2 * 10) + 2 * 7)
    keys, states = 5 + 1 + 5 + 2 + 5 + 3, 2 * 2 * 3 * 4 * 4
    assert floor.decode_s == 3 * ((layers + HEAD) * 2 + states) + keys * (TOKEN // 3)


EXPERTS = ExpertsConfig(
    layers=(True, False, True), num_experts=4, experts_per_token=2, expert_size=5, shared_size=6, shared_gate=True
)
# Beside attention, in the layers that have experts: the router with the gate, the shared expert; then one expert.
ROUTED, EXPERT = 2 * 8 * (4 + 1 + 3 * 6), 2 * 3 * 8 * 5
DENSE = LAYERS - 2 * 3 * 56


def test_decode_reads_the_experts_that_its_tokens_reach():
    """All experts in every step would be a floor that small batches can beat; those of one token, none at all."""
    keys = 3 * 2 + 2 * 3
    read = floor_of([1, 1, 1], [2, 3, 3], experts=EXPERTS).decode_s - keys * TOKEN
    three, two = 4 * (1 - 0.5**3), 4 * (1 - 0.5**2)
    assert read == 2 * (2 * (DENSE + ROUTED + HEAD) + (three + two) * EXPERT)


def test_prompts_go_through_as_many_experts_as_a_token_has():
    """The products of all experts would be a floor no faster than a dense model's."""
    pairs, last = 2 * (3 * 4 // 2) + 3, 2 * 160 + ROUTED // 2 + EXPERT
    products = 2 * (DENSE + ROUTED + 2 * EXPERT - last) * 3 + 2 * (last + HEAD)
    assert floor_of([3], [1], experts=EXPERTS).prefill_s == products + PAIR * pairs


def test_the_floor_does_not_count_idle_seats():
    """Two rows that take turns on one seat reach the experts of one token in each step, not those of two."""
    alone = floor_of([1], [2], experts=EXPERTS).decode_s
    assert floor_of([1, 1], [2, 2], seqs=1, experts=EXPERTS).decode_s == 2 * alone


def test_prompts_that_are_embedded():
    """Nothing is decoded: time came out negative, and that of states more so."""
    delta = load_toml(configs_dir() / "models" / "qwen3.5-9b.toml", ModelConfig)
    none, one = (find_floor(delta, 2, [100, 30], lens, max_num_seqs=2, rates=H100) for lens in ([0, 0], [1, 1]))
    assert none == one and none.decode_s == 0
    assert floor_of([20, 3], [0, 4]) == floor_of([20, 3], [1, 4])


def test_weights_of_fewer_bytes():
    """A floor of 16-bit weights is twice what a run of fp8 weights can reach; experts may have another form."""
    plain, half = floor_of([2], [3]), floor_of([2], [3], kept=MatrixBytes(1, 1))
    assert plain.prefill_s == half.prefill_s
    assert plain.decode_s - half.decode_s == 2 * LAYERS
    fast = floor_of([2], [3], kept=MatrixBytes(1, 1, fp8=True))
    of_layers = 2 * ((LAYERS - LAST) * 2 + LAST)
    assert plain.prefill_s - fast.prefill_s == of_layers / 2
    experts = ExpertsConfig(num_experts=4, experts_per_token=4, expert_size=3, layers=[True] * 3)
    plain, half = floor_of([2], [2], experts=experts), floor_of([2], [2], experts=experts, kept=MatrixBytes(2, 0.5))
    assert plain.decode_s - half.decode_s == 1.5 * 3 * 4 * 3 * 8 * 3


def test_k_and_v_in_8_bits():
    """A byte for each number and 4 for each head's scale; layers with short windows keep theirs."""
    whole, stored = (floor_of([3], [4], kv_cache_dtype=form) for form in ("auto", "fp8"))
    keys = 4 + 5 + 6
    assert whole.decode_s - stored.decode_s == keys * (TOKEN - 2 * 3 * 2 * (5 + 4))
    windows = {"sliding_windows": (0, 2, 0)}
    whole, stored = (floor_of([3], [4], kv_cache_dtype=form, **windows) for form in ("auto", "fp8"))
    assert whole.decode_s - stored.decode_s == keys * (TOKEN - 2 * 3 * 2 * (5 + 4)) * 2 // 3
