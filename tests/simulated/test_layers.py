"""The cost of latent attention, experts in parallel, attention data parallelism, recurrent layers and drafts."""

import dataclasses
import math

import numpy as np
import pytest

from ifbbench.build.resolve import resolve_limits
from ifbbench.clock import NANOSECONDS
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import ALL_TO_ALL, EXPERT_ROWS, CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import HardwareProfile, Links, load_hardware
from ifbbench.simulated.interconnect import NETWORK_SHARE
from ifbbench.simulated.shard import Shard, as_states_allow, kv_memory_bytes, plan_memory
from ifbbench.simulated.step_work import StepWork, StepWorks, least_work
from ifbbench.virtual_clock import VirtualClock
from tests.simulated.batches import batch_of

CASES = {
    "mla": ("deepseek-r1", {"tp_size": 8}),
    "ep": ("deepseek-r1", {"tp_size": 8, "ep_size": 8}),
    "dp": ("deepseek-r1", {"tp_size": 8, "ep_size": 8, "attention_dp_size": 8}),
    "two": ("deepseek-r1", {"tp_size": 8, "ep_size": 8, "attention_dp_size": 4}),
    "hybrid": ("qwen3-next-80b-a3b", {"tp_size": 2}),
    "windows": ("gpt-oss-120b", {}),
}
WORKS = (
    StepWork.of_lengths([(0, 512, True)], [100, 2000]),
    StepWork.of_lengths([], [100, 2000] * 40),
    StepWork.of_lengths([(1000, 4096, False)], []),
)


def cost_model(case: str, hardware="h200-sxm", dtype="fp8_block", two_batches=False, **options) -> CostModel:
    name, sizes = CASES[case]
    shard = Shard(load_model_config(name), dtype, "bf16", **(sizes | options))
    return CostModel(shard, load_hardware(hardware), two_batches=two_batches)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("two_batches", [False, True])
def test_the_time_is_the_sum_of_the_operations(case, two_batches):
    model = cost_model(case, two_batches=two_batches)

    for work in WORKS:
        total = sum(operation.seconds for operation in model.operations(work))
        assert model.device_ns(work) == pytest.approx(total * NANOSECONDS, abs=0.6)
    works = StepWorks(*map(np.array, zip(*WORKS, strict=True)))
    assert model.times_ns(works).tolist() == [model.device_ns(work) for work in WORKS]
    generation = StepWork.of_lengths([], [700] * 6)
    assert model.generation_ns(6, [6 * 700]) == [model.device_ns(generation)]


def test_layers_with_experts_have_constants_of_their_own():
    plain, hardware = cost_model("mla"), load_hardware("h200-sxm")
    changes = {"experts_memory": 0.44, "expert_kernel_s": 5e-6, "expert_launch_s": 1e-3}
    changed = CostModel(
        plain.shard, dataclasses.replace(hardware, constants=dataclasses.replace(hardware.constants, **changes))
    )
    work = StepWork.of_lengths([], [1000] * 4)
    before, after = ({one.name: one for one in model.operations(work)} for model in (plain, changed))
    products = ("expert gate and up product", "expert down product")

    # 58 of 61 layers. 5 kernels of attention and 4 of its latent form, 4 of an MLP, 4 and 3 of experts, and 8 that
    # quantize.
    more_s = (5e-6 - hardware.constants.kernel_s) * 58 * (5 + 4 + 4 + 4 + 3 + 8)
    assert after["kernel starts"].seconds - before["kernel starts"].seconds == pytest.approx(more_s)
    assert all(after[name].seconds == pytest.approx(2 * before[name].seconds, rel=0.01) for name in products)
    assert all(after[name] == one for name, one in before.items() if name not in (*products, "kernel starts"))
    assert changed.launch_ns - plain.launch_ns == pytest.approx(58e-3 * NANOSECONDS)
    of_16_bits = cost_model("mla", dtype="bf16").operations(work)
    quantizing_s = hardware.constants.kernel_s * (58 * 8 + 3 * 4)
    kernel_starts = next(one for one in of_16_bits if one.name == "kernel starts")
    assert before["kernel starts"].seconds - kernel_starts.seconds == pytest.approx(quantizing_s)


def test_activations_are_quantized_before_products_with_a_scale_for_each_block():
    hardware = load_hardware("b200")
    slower = dataclasses.replace(hardware, constants=dataclasses.replace(hardware.constants, quantize_s=1e-11))
    more_s = {}
    for dtype in ("fp8_block", "nvfp4"):
        shard = Shard(load_model_config("deepseek-r1"), dtype, "fp8", tp_size=8)
        before, after = (
            sum(one.seconds for one in CostModel(shard, each).of_tokens(4096)) for each in (hardware, slower)
        )
        more_s[dtype] = after - before

    # Inputs of the products of a layer on one of 8 GPUs: 16 heads of 128, 256 of the shared expert, 2,304 of an MLP.
    # The router has 16 bits, and products of experts have constants of their own.
    attention, shared, dense = 7168 + 1536 + 512 + 16 * 128, 7168 + 256, 7168 + 2304
    assert more_s == {"fp8_block": pytest.approx(4096e-11 * (61 * attention + 58 * shared + 3 * dense)), "nvfp4": 0.0}


@pytest.mark.parametrize(("ep_size", "attention_dp_size", "listed"), [(1, 1, 8.0), (8, 1, 8.0), (8, 8, 64 * 0.6564)])
def test_rows_of_experts_take_time_beside_their_products(ep_size, attention_dp_size, listed):
    """Rows of the experts of a device, and of all experts of the tokens that it has: with exchanged tokens those of
    which one of 8 experts is on it, 1 - (7/8)^8 of all."""
    hardware = load_hardware("h200-sxm")
    shard = Shard(
        load_model_config("deepseek-r1"),
        "fp8_block",
        "fp8",
        tp_size=8,
        ep_size=ep_size,
        attention_dp_size=attention_dp_size,
    )
    values, seconds = 4096 * 7168 * 58, {}
    for name in ("expert_row_s", "listed_row_s"):
        constants = dataclasses.replace(hardware.constants, **{name: 1e-12})
        slower = CostModel(shard, dataclasses.replace(hardware, constants=constants))
        before, after = (
            {one.name: one for one in each.of_tokens(4096)} for each in (CostModel(shard, hardware), slower)
        )
        seconds[name] = after.pop(EXPERT_ROWS).seconds
        assert after == before

    rows = shard.experts.rows(4096 * attention_dp_size) / 4096
    assert seconds["expert_row_s"] == pytest.approx(rows * values * 1e-12)
    assert seconds["listed_row_s"] == pytest.approx(listed * values * 1e-12, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_no_time_is_below_that_of_the_least_work(case):
    model = cost_model(case)
    hardware, peak = model.hardware, model.hardware.peak_flops["fp8"]

    for work in WORKS:
        flops, moved = least_work(model.shard, work)
        least_s = max(flops / peak, moved / hardware.memory_bandwidth)
        assert 0 < least_s * NANOSECONDS < model.device_ns(work)


def test_latent_attention_in_generation_is_absorbed():
    model, hardware = cost_model("mla"), load_hardware("h200-sxm")
    keys, heads, latent, rope, layers = 10_000, 128 // 8, 512, 64, 61
    _, attention = model.of_attention(StepWork(generation_tokens=4, generation_kv_tokens=keys))

    # Queries are multiplied by latent vector and rotated key, weights by the latent vector.
    assert attention.flops == 2 * layers * keys * heads * ((latent + rope) + latent)
    assert attention.bytes == layers * keys * (latent + rope) * 2
    constants = hardware.constants
    by_memory = attention.bytes / (constants.generation_attention * hardware.memory_bandwidth)
    by_compute = attention.flops / (constants.latent_attention * hardware.peak_flops["bf16"])
    assert attention.seconds == pytest.approx(math.hypot(by_memory, by_compute))


def test_latent_attention_in_the_context_phase_is_expanded():
    model = cost_model("mla")
    heads, layers = 128 // 8, 61
    first, _ = model.of_attention(StepWork.of_lengths([(0, 1000, True)]))
    second, _ = model.of_attention(StepWork.of_lengths([(1000, 1000, True)]))
    pairs = 1000 * 1001 // 2

    assert first.flops == 2 * layers * pairs * heads * ((128 + 64) + 128)
    # Keys and values of the cached tokens are computed again, beside the additional pairs.
    expansion = 2 * layers * 1000 * 512 * heads * (128 + 128) / model.hardware.matmul_flops_per_s("fp8_block")
    more_pairs = (pairs + 1000 * 1000) / pairs
    assert second.seconds == pytest.approx(first.seconds * more_pairs + expansion)


def test_every_rank_keeps_all_latent_vectors():
    one, eight = (cost_model("mla", tp_size=size).shard for size in (1, 8))

    assert one.kv_bytes_per_token == eight.kv_bytes_per_token == 61 * 576 * 2
    assert eight.kv_bytes_of_all_devices(10_000) == 10_000
    assert cost_model("dp").shard.kv_bytes_of_all_devices(10_000) == 80_000


def test_experts_are_divided_by_either_parallelism():
    tp, ep, dp = (cost_model(case).shard.parameter_bytes for case in ("mla", "ep", "dp"))

    assert tp == ep
    # With attention data parallelism each device has all other weights.
    whole = cost_model("mla", tp_size=1).shard
    experts = 58 * 256 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert dp == pytest.approx(experts / 8 + whole.parameter_bytes - experts, rel=1e-6)


def test_a_skewed_load_slows_the_slowest_part_and_copies_help():
    work = StepWork.of_lengths([(0, 8192, True)])
    even, skewed, copied = (
        cost_model("ep", **options).device_ns(work)
        for options in ({}, {"expert_load": "1"}, {"expert_load": "1", "redundant_experts": 64})
    )

    assert skewed > 1.1 * even
    assert copied < 1.05 * even


def test_attention_data_parallelism_exchanges_tokens_instead_of_all_reduces():
    tp, dp = cost_model("ep"), cost_model("dp")
    work = StepWork.of_lengths([], [1000] * 16)
    found = {one.name: one for one in dp.operations(work)}

    assert found["all-reduces"].seconds == 0
    assert {one.name for one in tp.operations(work)}.isdisjoint(ALL_TO_ALL)
    # Each of 16 tokens goes to the other parts with one of its 8 experts, once, in 8 bits with scales.
    receivers = 8 * (1 - (7 / 8) ** 8) * 7 / 8
    assert found["expert dispatch"].bytes == pytest.approx(58 * 16 * receivers * 7168 * (1 + 4 / 128))
    assert found["expert combine"].bytes == pytest.approx(58 * 16 * receivers * 7168 * 2)


def test_other_nodes_are_reached_by_their_network():
    near = load_hardware("h200-sxm")

    class Far(HardwareProfile):
        __slots__ = ()

        def links(self, devices: int) -> Links:
            return super().links(devices)._replace(per_node=devices // 2, between=5e10, between_s=1e-5)

    far = Far(**{field.name: getattr(near, field.name) for field in dataclasses.fields(near)})
    shard = cost_model("dp").shard
    tokens = 256
    one, two = (
        {found.name: found for found in CostModel(shard, hardware).of_tokens(tokens)}["expert combine"]
        for hardware in (near, far)
    )

    assert one.bytes == two.bytes
    moved, elsewhere = two.bytes / 58, 4 / 7
    flow = elsewhere * moved / (5e10 * NETWORK_SHARE)
    assert two.seconds == pytest.approx(58 * (flow + near.constants.all_to_all_s + 1e-5))


def test_two_batches_hide_the_exchange_and_read_weights_twice():
    tokens = StepWork.of_lengths([(0, 16_384, True)])
    plain, overlapped = cost_model("dp"), cost_model("dp", two_batches=True)

    def exchanged(model: CostModel) -> float:
        return sum(one.seconds for one in model.operations(tokens) if one.name in ALL_TO_ALL)

    assert exchanged(plain) > 0
    assert exchanged(overlapped) == 0
    assert overlapped.device_ns(tokens) < plain.device_ns(tokens)
    few = StepWork.of_lengths([], [1000] * 4)
    assert overlapped.device_ns(few) > plain.device_ns(few)


def test_parts_wait_for_the_largest():
    model = cost_model("dp")
    small, large = StepWork.of_lengths([], [100]), StepWork.of_lengths([(0, 64, True)], [5000] * 3)
    keys = StepWork.of_lengths([], [90_000])
    work = model.of_largest([small, large, keys])

    assert (work.context_tokens, work.generation_tokens, work.outputs) == (64, 3, 4)
    assert work.generation_kv_tokens == 90_000
    assert model.of_largest([large]) is large


def test_recurrent_layers_have_states_instead_of_keys():
    shard = cost_model("hybrid", tp_size=1).shard

    assert shard.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert shard.state_bytes_per_request == 36 * state
    model = CostModel(shard, load_hardware("h200-sxm"))
    states = {one.name: one for one in model.operations(StepWork.of_lengths([], [1000] * 8))}["recurrent states"]
    assert states.bytes == 8 * 2 * 36 * state


def test_states_limit_the_batch():
    model, hardware = load_model_config("qwen3-next-80b-a3b"), load_hardware("h200-sxm")
    config = RunConfig(dtype="fp8", kv_cache_dtype="bf16", max_batch_size=2048)
    limited = as_states_allow(model, hardware, config)
    plan = plan_memory(Shard.of_config(model, limited), hardware, limited)

    assert 300 < (limited.max_batch_size or 0) < 600
    assert plan.max_states == limited.max_batch_size
    assert plan.states <= plan.kv_cache * 1.05
    assert as_states_allow(load_model_config("llama-3.1-8b"), hardware, config) is config


def test_four_bits_are_multiplied_as_the_hardware_does():
    hopper, blackwell = load_hardware("h200-sxm"), load_hardware("b200")
    blackwell = dataclasses.replace(blackwell, peak_flops={**blackwell.peak_flops, "fp4": 9e15})

    assert hopper.product_dtype("nvfp4") == hopper.product_dtype("mxfp4") == "bf16"
    assert (blackwell.product_dtype("nvfp4"), blackwell.product_dtype("mxfp4")) == ("fp4", "fp8")
    model = load_model_config("deepseek-r1")
    narrow = Shard(model, "nvfp4", "fp8", tp_size=8)
    assert narrow.parameter_bytes < 0.61 * Shard(model, "fp8", "fp8", tp_size=8).parameter_bytes
    with pytest.raises(InputError, match="no matrix products in fp8_block"):
        load_hardware("a100-80gb-sxm").check_dtype("fp8_block")


def test_mxfp4_is_that_of_experts():
    model = load_model_config("gpt-oss-120b")
    shard = Shard(model, "mxfp4", "bf16")
    experts = 36 * 128 * 3 * 2880 * 2880

    # The published file has 65 GB.
    assert shard.parameter_bytes / 1e9 == pytest.approx(65, rel=0.02)
    routers = 36 * 2880 * 128
    rest = model.num_parameters - experts - routers
    assert shard.parameter_bytes == pytest.approx((experts + routers) * (0.5 + 1 / 32) + 2 * rest, rel=1e-6)


def test_a_draft_layer_takes_memory_and_a_layer_of_the_cache():
    model, hardware = load_model_config("deepseek-r1"), load_hardware("h200-sxm")
    config = RunConfig(dtype="fp8_block", kv_cache_dtype="bf16", max_batch_size=64, tp_size=8)
    plain, drafting = (kv_memory_bytes(model, hardware, one) for one in (config, config.with_values(draft_mtp=3)))
    # The published layer has 14 billion parameters with its own tables, 11.5 without.
    assert (plain - drafting) / 0.9 == pytest.approx(11.5e9 / 8, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 8, "ep_size": 3}, "--ep_size: 3 parts"),
        ({"tp_size": 8, "attention_dp_size": 3}, "--attention_dp_size: 3 parts"),
        ({"tp_size": 8, "ep_size": 8, "redundant_experts": 5}, "--redundant_experts"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Shard(load_model_config("deepseek-r1"), "fp8", "fp8", **options)
    with pytest.raises(InputError, match="--ep_size: 2 parts of the experts, but the model has none"):
        Shard(load_model_config("llama-3.1-8b"), "fp8", "fp8", tp_size=2, ep_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "attention_dp_size": 2, "tp_size": 2}, "--attention_dp_size: is simulated only"),
        ({"device": "cpu", "draft_mtp": 2, "acceptance_rate": "0.5"}, "--acceptance_rate: device cpu computes"),
        ({"attention_dp_size": 2, "pp_size": 2}, "--attention_dp_size: is not built with --pp_size"),
        ({"enable_two_batch_overlap": True}, "--enable_two_batch_overlap: hides the exchange"),
        ({"redundant_experts": 8}, "--redundant_experts: are divided"),
        ({"draft_mtp": 2}, "--draft_mtp: device sim:h200-sxm computes no tokens"),
        ({"draft_mtp": 2, "draft_len": 3, "acceptance_rate": "0.5"}, "--draft_len: 3, and --draft_mtp is 2"),
        ({"draft_mtp": 2, "draft_model": "tiny", "acceptance_rate": "0.5"}, "--draft_mtp: --draft_model proposes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    config = RunConfig(**{"device": "sim:h200-sxm", "model": "deepseek-r1", **options})
    with pytest.raises(InputError, match=message):
        resolve_limits(config, 4096, on_cpu=False)


def test_the_host_is_hidden_behind_the_device_with_a_draft_layer():
    given = RunConfig(device="sim:h200-sxm", model="deepseek-r1", draft_mtp=2, acceptance_rate="0.5", overlap="async")
    config = resolve_limits(given, 4096, on_cpu=False)
    model = load_model_config("deepseek-r1")
    cost = CostModel(Shard.of_config(model, config.with_values(tp_size=8)), load_hardware("h200-sxm"), draft_len=2)
    ends = []
    for hides_host in (False, True):
        clock = VirtualClock()
        executor = SimulatedExecutor(cost, clock, draft_model=cost, draft_mtp=2, hides_host=hides_host)
        for iteration in range(2):
            executor.submit(batch_of([], [100, 200])._replace(iteration=iteration))
            executor.collect()
        ends.append(clock.now_ns)

    assert (config.draft_len, config.overlap) == (2, "async")
    assert ends[0] - ends[1] == cost.host_ns(2)
