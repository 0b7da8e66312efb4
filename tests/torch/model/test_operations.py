"""The C kernels against PyTorch's operations."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.attention_plan import QuerySpans, spans_in_place
from ifbbench.torch.model.compiled import find_kernels, load_cpu_kernels
from ifbbench.torch.model.operations import CpuOperations, Operations, RotaryEmbedding, operations_for

CPU = torch.device("cpu")
DTYPES = {"float32": (torch.float32, 1e-6), "bf16": (torch.bfloat16, 4e-3)}
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES.keys())


def operations(dtype: torch.dtype) -> CpuOperations:
    kernels = load_cpu_kernels()
    if kernels is None:
        pytest.skip("no C compiler on this machine")
    return CpuOperations(kernels, dtype)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).norm()) <= tolerance * float(expected.double().norm())


@each_dtype
@pytest.mark.parametrize("shape", [(1, 5), (3, 256), (200, 688), (0, 64), (7, 3, 48)])
def test_norm(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    rows, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    expected = Operations().norm(rows.double(), weight.double(), 1e-5)
    assert_near(operations(dtype).norm(rows, weight, 1e-5), expected, tolerance)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 6), (3, 688), (200, 1376), (0, 64)])
def test_swiglu(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    gate_up = random(*shape, dtype=dtype) * 4
    assert_near(operations(dtype).swiglu(gate_up), Operations().swiglu(gate_up.double()), tolerance)


def test_swiglu_is_exact_to_the_last_bits_over_its_whole_range() -> None:
    gate = torch.linspace(-90, 90, 40_000)
    result = operations(torch.float32).swiglu(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    assert ((result - expected).abs() <= 1e-6 * expected.abs() + 1e-35).all()


def test_swiglu_of_large_values() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 4.0]])
    assert operations(torch.float32).swiglu(gate_up).tolist() == [[0.0, 600.0, 0.0]]


@each_dtype
@pytest.mark.parametrize("head_dim", [2, 16, 32, 64, 80, 128])
def test_rotation_in_place_leaves_neighbours_unchanged(dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    config = ModelConfig(
        vocab_size=9,
        hidden_size=8,
        num_layers=1,
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=8,
        max_position_embeddings=50,
    )
    rotary, positions = RotaryEmbedding(config, CPU), torch.tensor([0, 49, 7, 7, 30])
    fused = random(5, 5, head_dim, dtype=dtype)
    before, kernels, plain = fused.clone(), operations(dtype), Operations()
    expected = plain.rotate(before[:, :4].double(), plain.angles(rotary, positions, before.double()))
    kernels.rotate(fused[:, :4], kernels.angles(rotary, positions, fused))
    assert_near(fused[:, :4], expected, tolerance)
    assert torch.equal(fused[:, 4], before[:, 4])


@each_dtype
def test_keys_and_values_are_written_to_their_rows(dtype: torch.dtype, tolerance: float) -> None:
    fused, rows = random(5, 2 + 3 + 3, 16, dtype=dtype), torch.tensor([7, 0, 11, 4, 3])
    keys, values = torch.full((3, 4, 3, 16), 5.0, dtype=dtype), torch.full((3, 4, 3, 16), 6.0, dtype=dtype)
    expected_keys = keys.clone().view(12, 3, 16).index_copy_(0, rows, fused[:, 2:5])
    expected_values = values.clone().view(12, 3, 16).index_copy_(0, rows, fused[:, 5:])
    operations(dtype).write(fused[:, 2:5], fused[:, 5:], keys, values, rows)
    assert torch.equal(keys.view(12, 3, 16), expected_keys)
    assert torch.equal(values.view(12, 3, 16), expected_values)


@each_dtype
@pytest.mark.parametrize("tokens_per_block", [1, 8, 32])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(1, 1, 4), (4, 2, 32), (2, 3, 64), (2, 1, 80), (1, 9, 128), (3, 5, 20)]
)
def test_attention_of_a_mixed_batch_in_place(
    kernels: ctypes.CDLL,
    dtype: torch.dtype,
    tolerance: float,
    tokens_per_block: int,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    """Against PyTorch's attention in float64: single queries, whole prompts and later chunks; blocks in random order,
    NaN wherever no key is."""
    counts, ends = np.array([1, 33, 1, 7, 1, 65, 2]), np.array([1, 33, 200, 32, 7, 150, 130])
    rows = 1 + np.cumsum(counts) - counts
    width, generator = 256 // tokens_per_block, np.random.default_rng(0)
    tables = generator.permutation(len(ends) * width).astype(np.int32).reshape(-1, width)
    shape = (len(ends) * width, tokens_per_block, kv_heads, head_dim)
    keys, values = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    num_rows, heads = 1 + int(counts.sum()), kv_heads * group
    fused = random(num_rows, heads + 2, head_dim, dtype=dtype)
    queries, expected = fused[:, :heads], torch.full((num_rows, heads, head_dim), 5.0, dtype=torch.float64)
    for row, count, end, table in zip(rows.tolist(), counts.tolist(), ends.tolist(), tables, strict=True):
        own_keys, own_values = (random(end, kv_heads, head_dim, dtype=dtype) * scale for scale in (1, 3))
        places = torch.arange(end)
        blocks = torch.from_numpy(table.astype(np.int64))[places // tokens_per_block]
        keys[blocks, places % tokens_per_block], values[blocks, places % tokens_per_block] = own_keys, own_values
        expected[row : row + count] = torch.nn.functional.scaled_dot_product_attention(
            queries[row : row + count].transpose(0, 1).double(),
            own_keys.transpose(0, 1).double(),
            own_values.transpose(0, 1).double(),
            attn_mask=places <= torch.arange(end - count, end)[:, None],
            enable_gqa=True,
        ).transpose(0, 1)
    spans = spans_in_place(QuerySpans(rows, counts, ends - counts, np.arange(len(ends))), tables, tokens_per_block)
    output = torch.full((num_rows, heads, head_dim), 5.0, dtype=dtype)
    CpuOperations(kernels, dtype).attend(queries, keys, values, spans, output)
    assert (output[0] == 5.0).all()
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        assert_near(output[row : row + count], expected[row : row + count], tolerance)


@each_dtype
def test_attention_of_scores_far_apart(dtype: torch.dtype, tolerance: float) -> None:
    """The softmax must neither overflow nor lose scores that follow one far above or below them."""
    queries, values = torch.full((40, 1, 16), 30.0, dtype=dtype), random(5, 8, 1, 16, dtype=dtype)
    keys = torch.zeros(5, 8, 1, 16, dtype=dtype)
    keys.view(40, 16)[:, 0] = torch.linspace(-40, 40, 40)[torch.randperm(40)]
    spans = spans_in_place(
        QuerySpans(*map(np.array, ([0, 39], [39, 1], [0, 39], [0, 0]))), np.arange(5, dtype=np.int32)[None], 8
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1).double(), keys.view(1, 40, 16).double(), values.view(1, 40, 16).double(), is_causal=True
    ).transpose(0, 1)
    output = torch.empty_like(queries)
    operations(dtype).attend(queries, keys, values, spans, output)
    assert_near(output, expected, tolerance)


def test_no_spans() -> None:
    none = spans_in_place(QuerySpans(*[np.zeros(0, np.int64)] * 4), np.zeros((2, 3), np.int32), 8)
    cache, output = torch.zeros(3, 8, 1, 4), torch.ones(1, 2, 4)
    operations(torch.float32).attend(torch.zeros(0, 2, 4), cache, cache, none, output)
    assert (output == 1.0).all()


def test_without_a_compiler_pytorch_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CC", compiler)
        assert isinstance(find_kernels(), str)
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert isinstance(find_kernels(), str)


def test_kinds_without_kernels() -> None:
    assert not operations_for(CPU, torch.float16).attends_in_place
