"""The cost model: sums of operations, hardware limits, and monotonic times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.clock import NANOSECONDS
from ifbbench.errors import InputError
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.engines import load_overhead
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.step_work import StepWork
from tests.simulated.batches import cost_model

SETUPS = (
    ("llama-3.1-8b", "h100-sxm", {"dtype": "fp8"}),
    ("llama-3.1-8b", "a100-80gb-sxm", {"dtype": "int4"}),
    ("llama-3.3-70b", "h200-sxm", {"dtype": "bf16", "kv_cache_dtype": "fp8", "tp_size": 4}),
    ("llama-3.1-405b", "b200", {"dtype": "fp8", "tp_size": 8, "pp_size": 2}),
    ("qwen3-0.6b", "l40s", {"dtype": "fp16", "cuda_graphs": False}),
    ("llama-2-7b", "a10g", {"dtype": "bf16"}),
    ("mixtral-8x7b", "h200-sxm", {"dtype": "fp8", "tp_size": 2}),
    ("tiny", "cpu", {"dtype": "float32"}),
)
MODELS = {f"{model} on {device} {options}": cost_model(model, device, **options) for model, device, options in SETUPS}
any_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
LENGTHS = st.integers(1, 100_000)
CHUNKS = st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 8192), st.booleans()), max_size=6)
WORKS = st.builds(StepWork.of_lengths, CHUNKS, st.lists(LENGTHS, max_size=40)).filter(lambda work: work.num_tokens > 0)


def _times(model: CostModel, work: StepWork) -> dict[str, float]:
    return {operation.name: operation.seconds for operation in model.operations(work)}


@any_model
@settings(max_examples=25)
@given(work=WORKS)
def test_the_operations_add_up_to_the_time_of_the_iteration(model, work):
    total_ns = sum(_times(model, work).values()) * NANOSECONDS

    assert model.device_ns(work) == pytest.approx(total_ns, rel=1e-9, abs=1)


@any_model
@settings(max_examples=25)
@given(work=WORKS)
def test_no_operation_is_faster_than_the_hardware(model, work):
    hardware = model.hardware
    fastest = max(hardware.peak_flops.values())
    for operation in model.operations(work):
        is_network = operation.name in ("all-reduces", "pipeline transfer")
        bandwidth = hardware.link_bandwidth if is_network else hardware.memory_bandwidth
        assert operation.flops <= fastest * operation.seconds
        assert operation.bytes <= bandwidth * operation.seconds


@any_model
@settings(max_examples=25)
@given(work=WORKS, chunk=st.tuples(st.integers(0, 100_000), st.integers(1, 8192)), kv_length=LENGTHS)
def test_more_work_never_takes_less_time(model, work, chunk, kv_length):
    start, length = chunk
    more = [
        StepWork.of_lengths([(start, length, False)]),
        StepWork.of_lengths([], [kv_length]),
        StepWork(outputs=1),
        StepWork(generation_kv_tokens=1000),
        StepWork(attention_pairs=1000),
        StepWork(context_kv_tokens=1000),
    ]
    for extra in more:
        longer = StepWork(*map(sum, zip(work, extra, strict=True)))
        assert model.device_ns(longer) >= model.device_ns(work)


@any_model
@settings(max_examples=25)
@given(st.integers(1, 3000), st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_many_iterations_at_once_take_what_each_takes(model, tokens, kv_tokens):
    together = model.generation_ns(tokens, kv_tokens)

    works = [StepWork(generation_tokens=tokens, generation_kv_tokens=keys, outputs=tokens) for keys in kv_tokens]
    assert together == [model.device_ns(work) for work in works]


def test_flops_and_bytes_are_those_of_the_shape():
    """A prompt of 1,000 tokens and one request of 500 keys, by hand."""
    model = MODELS["llama-3.1-8b on h100-sxm {'dtype': 'fp8'}"]
    found = {operation.name: operation for operation in model.operations(StepWork.of_lengths([(0, 1000, True)], [500]))}

    products = ("QKV product", "attention output product", "gate and up product", "down product")
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336)
    assert sum(found[name].flops for name in products) == 2 * 1001 * weights
    assert sum(found[name].bytes for name in products) > weights
    assert found["context attention"].flops == 4 * 32 * 4096 * 1000 * 1001 // 2
    assert found["generation attention"].bytes == 500 * 65_536
    assert found["output layer"].flops == 2 * 2 * 4096 * 128_256
    assert found["all-reduces"].seconds == 0


def test_a_chunk_costs_more_the_later_it_is():
    model = MODELS["llama-3.1-8b on h100-sxm {'dtype': 'fp8'}"]

    first, later = (model.device_ns(StepWork.of_lengths([(start, 2048, False)])) for start in (0, 100_000))
    whole = model.device_ns(StepWork.of_lengths([(0, 4096, True)]))
    halves = [model.device_ns(StepWork.of_lengths([(start, 2048, start > 0)])) for start in (0, 2048)]
    assert later > 2 * first
    assert sum(halves) == pytest.approx(whole, rel=0.1)
    assert sum(halves) > whole


def test_weights_are_read_once_whatever_the_batch():
    """With few tokens the products are bound by reading weights, with many by arithmetic."""
    model = MODELS["llama-3.1-8b on h100-sxm {'dtype': 'fp8'}"]
    limits = {}
    for tokens in (1, 16, 4096):
        operations = model.operations(StepWork(context_tokens=tokens))
        limits[tokens] = next(operation for operation in operations if operation.name == "gate and up product")

    assert limits[16].seconds == pytest.approx(limits[1].seconds, rel=0.02)
    assert (limits[16].limit, limits[4096].limit) == ("memory", "compute")


def test_smaller_weights_are_quicker_to_read():
    work = StepWork.of_lengths([], [100] * 4)

    times = [cost_model("llama-3.1-8b", "h100-sxm", dtype=dtype).device_ns(work) for dtype in ("bf16", "fp8", "int4")]
    assert times == sorted(times, reverse=True)


def test_tensor_parallelism_splits_the_work_and_adds_all_reduces():
    work = StepWork.of_lengths([(0, 4096, True)], [1000] * 64)
    one, eight = (_times(cost_model("llama-3.3-70b", "h100-sxm", dtype="fp8", tp_size=size), work) for size in (1, 8))

    assert one["all-reduces"] == 0 < eight["all-reduces"]
    assert eight["down product"] == pytest.approx(one["down product"] / 8, rel=0.1)
    assert 1 / 8 < sum(eight.values()) / sum(one.values()) < 1 / 2


def test_more_devices_than_key_heads_keep_a_head_each():
    work = StepWork.of_lengths([], [1000] * 64)
    models = (cost_model("llama-3.3-70b", "h100-sxm", dtype="fp8", tp_size=size) for size in (8, 16))
    eight, sixteen = (
        next(operation.bytes for operation in model.operations(work) if operation.name == "generation attention")
        for model in models
    )
    assert eight == sixteen > 0


def test_a_batch_takes_as_long_through_a_pipeline_but_for_the_hops():
    work = StepWork.of_lengths([], [1000] * 64)
    one, four = (cost_model("llama-3.3-70b", "h100-sxm", dtype="fp8", pp_size=size) for size in (1, 4))

    assert one.device_ns(work) < four.device_ns(work) < 1.1 * one.device_ns(work)


def test_without_cuda_graph_the_host_launches_one_kernel_after_the_other():
    work = StepWork.of_lengths([], [10])
    with_graph, without = (cost_model("qwen3-0.6b", "h100-sxm", "bf16", cuda_graphs=graphs) for graphs in (True, False))

    waited = _times(without, work)["waiting for launches"]
    assert waited > 0 == _times(with_graph, work)["waiting for launches"]
    assert without.device_ns(work) - with_graph.device_ns(work) == pytest.approx(waited * NANOSECONDS, abs=2)


def test_the_host_takes_time_for_each_request():
    model = MODELS["llama-3.1-8b on h100-sxm {'dtype': 'fp8'}"]

    assert 0 < model.host_ns(1) < model.host_ns(1000)
    assert model.host_ns(1001) - model.host_ns(1000) == pytest.approx(2500, abs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "--dtype: NVIDIA A100 SXM 80 GB has no matrix products in fp8"),
        ({"dtype": "bf16", "tp_size": 3}, "--tp_size: 3 devices cannot share 32 attention heads"),
        ({"dtype": "bf16", "pp_size": 33}, "--pp_size: 33 stages are more than the model's 32 layers"),
    ],
)
def test_what_does_not_go_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        cost_model("llama-3.1-8b", "a100-80gb-sxm", **options)


def test_a_small_all_reduce_takes_one_shot_and_a_large_one_a_ring():
    """TP 8 takes hardly longer than TP 2 for a few tokens; for many it is bound by the network."""
    times = {
        (size, tokens): _times(
            cost_model("llama-3.3-70b", "h100-sxm", "fp8", tp_size=size), StepWork(generation_tokens=tokens)
        )["all-reduces"]
        / 160
        for size in (2, 8)
        for tokens in (4, 8192)
    }
    assert 5e-6 < times[2, 4] < times[8, 4] < 12e-6
    message = 8192 * 8192 * 2
    ring = 2.4e-5 * 3 + 2 * 7 / 8 * message / (0.915 * 4.5e11)
    assert times[8, 8192] == pytest.approx(ring, rel=1e-6)


def test_more_devices_make_a_small_batch_quicker():
    work = StepWork.of_lengths([], [1000] * 4)
    times = [cost_model("llama-3.3-70b", "h200-sxm", "fp8", tp_size=size).device_ns(work) for size in (1, 2, 4, 8)]

    assert times == sorted(times, reverse=True)


def test_a_mixture_of_experts_reads_those_that_are_hit():
    model = cost_model("mixtral-8x7b", "h200-sxm", "bf16")
    expert = 32 * 3 * 4096 * 14_336 * 2
    bytes_of = {}
    for tokens in (1, 4, 4096):
        operations = {one.name: one for one in model.operations(StepWork(generation_tokens=tokens))}
        products = [operations["expert gate and up product"], operations["expert down product"]]
        bytes_of[tokens] = sum(one.bytes for one in products)
        assert sum(one.flops for one in products) == pytest.approx(2 * tokens * 2 * expert / 2)
        assert operations["router"].flops == 2 * tokens * 32 * 4096 * 8

    assert bytes_of[1] == pytest.approx(2 * expert, rel=0.01)
    assert bytes_of[4] == pytest.approx(8 * (1 - 0.75**4) * expert, rel=0.01)
    assert 8 * expert < bytes_of[4096]


def test_a_model_with_experts_is_quicker_than_a_dense_one_of_its_size():
    """Qwen3-30B-A3B at batch 1 reads an eighth of Qwen3-32B's weights at most."""
    one = StepWork.of_lengths([], [100])
    sparse, dense = (cost_model(name, "h200-sxm", "bf16") for name in ("qwen3-30b-a3b", "qwen3-32b"))

    assert sparse.device_ns(one) < dense.device_ns(one) / 4
    assert sparse.shard.parameter_bytes == pytest.approx(2 * 30.53e9, rel=0.01)


def test_the_host_takes_time_for_prompt_tokens_where_an_engine_does():
    model = CostModel(
        MODELS["tiny on cpu {'dtype': 'float32'}"].shard,
        load_overhead("sglang").applied_to(load_hardware("h100-sxm"), "bf16"),
    )
    assert model.host_ns(1, 1000) - model.host_ns(1) == pytest.approx(1e6, rel=1e-3)
