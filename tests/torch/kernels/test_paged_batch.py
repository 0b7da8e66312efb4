"""An iteration copies the block table columns that its sequences use to the device, not all columns."""

import numpy as np
import pytest
import torch

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.launch import AttentionTiles
from ifbbench.torch.model.attention_plan import QuerySpans
from ifbbench.torch.model.kernel_llama import KernelShapes, plan_paged_batch

SHAPES = KernelShapes(AttentionTiles(16, 16, 4, 1), AttentionTiles(16, 16, 4, 1), 2, 1, 1)
RULES = [AttentionWindow(8), AttentionWindow(8, size=14, sink=3, is_cyclic=False), AttentionWindow(8, size=14, sink=3)]


@pytest.mark.parametrize("rule", RULES, ids=["all", "window", "cyclic window"])
@pytest.mark.parametrize("longest", [1, 3, 8, 9, 17, 40])
def test_no_token_is_stored_beyond_the_used_blocks(rule: AttentionWindow, longest: int) -> None:
    used = rule.blocks_used(longest)
    last_position = int(rule.cache_positions(np.arange(longest)).max())
    assert last_position // 8 < used <= last_position // 8 + 1 + (rule.bubble > 0)


def test_wide_tables_are_cut_to_the_longest_sequence(device: torch.device) -> None:
    tables = np.arange(4 * 1000, dtype=np.int32).reshape(4, 1000)
    spans = QuerySpans(
        first_rows=np.array([0, 9]), lengths=np.array([9, 1]), starts=np.array([0, 20]), table_rows=np.array([3, 1])
    )
    batch = plan_paged_batch(spans, 1, tables, np.arange(10), RULES[0], SHAPES, device)
    assert batch.block_tables.tolist() == tables[[3, 1], :3].tolist()


def test_an_empty_batch_uses_no_blocks() -> None:
    assert RULES[0].blocks_used(0) == 0
