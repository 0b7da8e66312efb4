"""The choice of tokens against a simple one in float64, and its invariants for extreme values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.torch.kernels import token_choice
from ifbbench.torch.kernels.token_choice import choose_tokens, log_probs_of
from tests.torch.kernels.comparing import DTYPES, assert_close
from tests.torch.kernels.references import choose_tokens_reference, log_probs_reference

BOTH = pytest.mark.parametrize("choose", [choose_tokens, choose_tokens_reference])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of some hundred tokens takes several steps."""
    monkeypatch.setattr(token_choice, "TOKENS_AT_ONCE", 128)
    monkeypatch.setattr(token_choice, "TOKENS_AT_ONCE_IN_SEARCH", 64)


def logits_of(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(4)) * 2).to(device, dtype)


def column(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def chosen(
    choose, logits: Tensor, temperatures: list[float], top_k: list[int], top_p: list[float], uniforms: list[float]
) -> list[int]:
    device = logits.device
    tokens = choose(
        logits,
        column(temperatures, torch.float32, device),
        column(top_k, torch.int32, device),
        column(top_p, torch.float32, device),
        column(uniforms, torch.float64, device),
    )
    assert tokens.dtype == torch.int64
    assert tokens.device == device
    result: list[int] = tokens.tolist()
    return result


def plainly_chosen(logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """One row, token by token."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    order = order[: top_k or len(order)]
    share = np.cumsum(weights[order]) / weights[order].sum()
    order = order[: int(np.searchsorted(share, top_p)) + 1] if top_p < 1 else order
    kept = np.sort(order)
    running = np.cumsum(weights[kept])
    return int(kept[min(np.searchsorted(running, uniform * running[-1], side="right"), len(kept) - 1)])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 64, 300])
def test_all_sampling_parameters(choose, dtype: torch.dtype, vocabulary: int, device: torch.device) -> None:
    """In one batch, without ties."""
    parameters = [
        (0.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.3, 4, 1.0),
        (1.0, 0, 0.6),
        (0.9, 20, 0.8),
        (1.0, 1, 1.0),
        (2.0, 0, 0.01),
    ]
    logits = torch.stack([torch.randperm(vocabulary, generator=torch.Generator().manual_seed(row)) for row in range(7)])
    logits = (logits / 16).to(device, dtype)
    uniforms = np.random.default_rng(0).random(len(parameters)).tolist()
    expected = [
        plainly_chosen(row.double().cpu().numpy(), *row_parameters, uniform)
        for row, row_parameters, uniform in zip(logits, parameters, uniforms, strict=True)
    ]
    temperatures, top_k, top_p = (list(column) for column in zip(*parameters, strict=True))
    assert chosen(choose, logits, temperatures, top_k, top_p, uniforms) == expected


@BOTH
def test_shares_are_the_probabilities(choose, device: torch.device) -> None:
    """Uniform numbers spread over [0, 1) fall on each kept token as often as it is likely."""
    weights = np.array([0.0, 0.1, 0.4, 0.1, 0.25, 0.15])
    rows = 40
    logits = torch.from_numpy(np.log(np.maximum(weights, 1e-30))).float().expand(rows, -1).contiguous().to(device)
    uniforms = ((np.arange(rows) + 0.25) / rows).tolist()
    tokens = chosen(choose, logits, [1.0] * rows, [0] * rows, [1.0] * rows, uniforms)
    assert np.bincount(tokens, minlength=6).tolist() == [0, 4, 16, 4, 10, 6]
    assert tokens == sorted(tokens)
    tokens = chosen(choose, logits, [1.0] * rows, [3] * rows, [1.0] * rows, uniforms)
    assert np.bincount(tokens, minlength=6).tolist() == [0, 0, 20, 0, 13, 7]


@BOTH
def test_tokens_as_likely_as_the_last_kept_one_are_kept(choose, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0, 1.0]]).expand(16, -1).contiguous().to(device)
    uniforms = ((np.arange(16) + 0.5) / 16).tolist()
    tokens = chosen(choose, logits, [1.0] * 16, [3] * 16, [1.0] * 16, uniforms)
    assert set(tokens) == {0, 1, 2, 3, 5}
    # 2, 2 and one 1 weigh 2e² + e together; 0.9 of that is reached by the third.
    assert set(chosen(choose, logits, [1.0] * 16, [3] * 16, [0.9] * 16, uniforms)) == {0, 1, 2, 3, 5}
    assert set(chosen(choose, logits, [1.0] * 16, [3] * 16, [0.8] * 16, uniforms)) == {1, 3}


@BOTH
def test_the_first_of_equal_logits_is_the_greedy_one(choose, device: torch.device) -> None:
    logits = torch.zeros((2, 300), device=device)
    logits[0, [7, 130, 299]] = 3.0
    assert chosen(choose, logits, [0.0, 0.0], [0, 0], [1.0, 1.0], [0.5, 0.5]) == [7, 0]


@BOTH
def test_extreme_numbers(choose, device: torch.device) -> None:
    """Infinitely unlikely tokens, temperatures near 0 and near infinity, and the last uniform number below 1."""
    logits = logits_of(4, 200, device)
    logits[:, ::2] = -torch.inf
    best = logits.argmax(dim=-1).tolist()
    tokens = chosen(choose, logits, [1e-45, 1e-30, 1e30, 1.0], [0] * 4, [1.0] * 4, [0.99, 0.99, 1 - 2**-53, 1 - 2**-53])
    assert tokens[:2] == best[:2]
    assert tokens[2:] == [199, 199]
    assert chosen(choose, logits, [1.0] * 4, [0] * 4, [0.999999] * 4, [0.0] * 4) == [1] * 4


def test_no_rows(device: torch.device) -> None:
    assert chosen(choose_tokens, torch.empty((0, 9), device=device), [], [], [], []) == []
    assert log_probs_of(torch.empty((0, 9), device=device), column([], torch.int64, device)).tolist() == []


@pytest.mark.parametrize("log_probs", [log_probs_of, log_probs_reference])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 9000])
def test_log_probs(log_probs, dtype: torch.dtype, vocabulary: int, device: torch.device) -> None:
    logits = logits_of(3, vocabulary, device, dtype) + 1
    tokens = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    expected = logits.double().log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    actual = log_probs(logits, tokens)
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() < 1e-5
    if vocabulary > 1:
        assert_close(actual, expected, torch.float32)
