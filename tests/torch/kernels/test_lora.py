"""The grouped products of LoRA adapters, against one product after the other."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.clock import WallClock
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.kv.adapters import LoraConfig
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import MODULES_OF_PRODUCT, LayerProduct, PageLayout, Placement, lora_modules
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.kernels import lora
from ifbbench.torch.model.kernel_llama import KernelLlama
from ifbbench.torch.model.kernel_lora import KernelProducts
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.lora import AdapterProducts, AdapterRows, TorchProducts
from ifbbench.torch.model.lora_files import Adapter, RandomAdapter
from ifbbench.torch.model.lora_store import AdapterStore, pages_in_host_memory
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.model_executor import ModelExecutor
from tests.engine.engine import adapters_of
from tests.torch.driving import CPU
from tests.torch.kernels.comparing import DTYPES, assert_close

# Sizes that are no multiples of the kernels' tiles.
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=72,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=200,
    max_position_embeddings=256,
)
MAX_RANK = 20


def reference(
    output: Tensor,
    rows: Tensor,
    parts: Sequence[AdapterRows],
    matrices: dict[int, list[tuple[Tensor, Tensor] | None]],
    layout: PageLayout,
    product: LayerProduct,
) -> Tensor:
    """`output` + B·(A·x), in float64."""
    result = output.double().clone()
    for first, end, task in parts:
        for index in MODULES_OF_PRODUCT[product]:
            if (pair := matrices[task][index]) is not None:
                module, (lora_a, lora_b) = layout.modules[index], (matrix.double() for matrix in pair)
                columns = slice(module.offset, module.offset + module.outputs)
                result[first:end, columns] += rows[first:end].double() @ lora_a.t() @ lora_b.t()
    return result


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def adapters(ranks: dict[int, list[int]]) -> tuple[PageLayout, dict[int, Placement], dict[int, list]]:
    """Of each task the ranks of its modules, the same in both layers; its place, and its matrices in layer 1."""
    generator = torch.Generator().manual_seed(1)
    layout = PageLayout(lora_modules(CONFIG), CONFIG.num_layers, MAX_RANK)
    places = {task: layout.place(np.array([own, own], np.int32)) for task, own in ranks.items()}
    matrices = {
        task: [
            (drawn((rank, module.inputs), generator), drawn((module.outputs, rank), generator)) if rank else None
            for rank, module in zip(own, layout.modules, strict=True)
        ]
        for task, own in ranks.items()
    }
    return layout, places, matrices


def placed(
    products: AdapterProducts,
    pool: Tensor,
    layout: PageLayout,
    place: Placement,
    task: int,
    pages: Sequence[int],
    matrices: list,
) -> None:
    """Write the adapter to the pool, as the executor's copies do."""
    for source, destination in products.place(task, place, pages):
        destination.copy_(source)
    for index, pair in enumerate(matrices):
        if pair is not None:
            values = torch.cat([matrix.flatten() for matrix in pair]).to(pool)
            first = int(place.slot[1, index]) * layout.width
            pool[pages[int(place.page[1, index])], first : first + len(values)] = values


RANKS = {7: [1, 5, 8, 16, 3, 8, 20], 3: [8] * 7, 9: [4, 0, 4, 0, 0, 2, 0]}
PAGES = {7: (4, 1), 3: (0,), 9: (2,)}
CASES = {
    "generation": [(0, 1, 7), (1, 4, 3), (5, 6, 9)],
    "context and generation": [(0, 37, 3), (40, 57, 9), (57, 58, 7), (58, 60, 3)],
    "long context": [(3, 140, 7)],
}


@pytest.mark.parametrize("kind", [KernelProducts, TorchProducts])
@pytest.mark.parametrize("product", list(LayerProduct))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_products_of_mixed_adapters(
    kind: type[AdapterProducts],
    product: LayerProduct,
    case: list[tuple[int, int, int]],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora, "SMALLEST_SPLIT", 64)  # so that inputs are split
    check(kind, product, [AdapterRows(*one) for one in case], torch.float32, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_types(dtype: torch.dtype, device: torch.device) -> None:
    check(KernelProducts, LayerProduct.QUERY_KEY_VALUE, [AdapterRows(0, 3, 7), AdapterRows(3, 20, 3)], dtype, device)


def test_no_rows(device: torch.device) -> None:
    layout, places, matrices = adapters({3: [8] * 7})
    pool = torch.zeros((1, layout.page_values), device=device)
    products = KernelProducts(layout, pool)
    placed(products, pool, layout, places[3], 3, (0,), matrices[3])
    of_outputs = products.of_rows([AdapterRows(0, 2, 3)], []).of_outputs
    output = torch.ones((4, CONFIG.hidden_size), device=device)
    of_outputs.add(1, LayerProduct.DOWN, torch.ones((4, CONFIG.intermediate_size), device=device), output)
    assert (output == 1).all()


def check(
    kind: type[AdapterProducts],
    product: LayerProduct,
    rows: list[AdapterRows],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Rows without an adapter, and columns of modules without one, stay as they are."""
    layout, places, matrices = adapters(RANKS)
    assert len(places[7].used) == 2, "an adapter of several pages"
    pool = torch.full((6, layout.page_values), torch.nan, device=device, dtype=dtype)
    products = kind(layout, pool)
    for task, place in places.items():
        placed(products, pool, layout, place, task, PAGES[task], matrices[task])
    generator = torch.Generator().manual_seed(2)
    members = [layout.modules[index] for index in MODULES_OF_PRODUCT[product]]
    inputs = torch.randn((max(one.end for one in rows) + 2, members[0].inputs), generator=generator).to(device, dtype)
    before = torch.randn((len(inputs), sum(one.outputs for one in members)), generator=generator).to(device, dtype)
    output = before.clone()
    products.of_rows(rows, []).add(1, product, inputs, output)
    rounded = {
        task: [pair and tuple(matrix.to(device, dtype) for matrix in pair) for pair in of_task]
        for task, of_task in matrices.items()
    }
    assert_close(output, reference(before, inputs, rows, rounded, layout, product), dtype)
    has_adapter = torch.zeros(len(inputs), dtype=torch.bool)
    for first, end, _ in rows:
        has_adapter[first:end] = True
    assert torch.equal(output[~has_adapter], before[~has_adapter])


def test_the_executor_gives_the_same_tokens_with_kernels_as_without(device: torch.device) -> None:
    """Few pages, so that adapters are evicted and loaded again."""
    config = replace(CONFIG, num_layers=1, head_dim=16)
    outputs = []
    for model in (
        LlamaModel(config, random_weights(config, 3, CPU, torch.float32)),
        KernelLlama(config, random_weights(config, 3, device, torch.float32)),
    ):
        adapters_of_tasks: dict[int, Adapter] = {task: RandomAdapter(task, task + 2, config, 5) for task in range(4)}
        store = AdapterStore(config, adapters_of_tasks, 8, pages_in_host_memory(torch.float32, device.type == "cuda"))
        lora_config = LoraConfig(store, 2, 100, store.layout.page_values * 4, 4)
        limits = BatchingConfig(
            "guaranteed_no_evict",
            max_batch_size=4,
            max_num_tokens=24,
            max_seq_len=40,
            max_input_len=39,
            tokens_per_block=8,
            num_blocks=30,
            chunk_unit=8,
            lora=lora_config,
        )
        executor = ModelExecutor(model, one_window_layout(config, 30, 8), limits.num_slots, 40, lora=lora_config)
        waiting = [
            Request(
                index,
                5 + 3 * index,
                3,
                prompt_tokens=np.arange(5 + 3 * index, dtype=np.int32) * 7 % 61,
                lora_task_id=[None, 0, 1, 2, 3, 0][index],
            )
            for index in range(6)
        ]
        found: dict[int, list[int]] = {}

        def respond(response: Response, found: dict[int, list[int]] = found) -> None:
            assert response.output_tokens is not None
            found[response.request.request_id] = response.output_tokens.tolist()

        def get_requests(count: int, waiting: list[Request] = waiting) -> list[Request]:
            return [waiting.pop(0) for _ in range(min(count, len(waiting)))]

        loop = make_loop(limits, executor, WallClock(), get_requests, respond)
        while loop.step():
            pass
        assert adapters_of(loop).counters.evictions > 0
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0].values()}) == 6
