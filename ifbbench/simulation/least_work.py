"""What a batch asks of a device at the least, however it is computed."""

from typing import NamedTuple

from ifbbench.simulation.shard import Shard
from ifbbench.simulation.step_work import StepWork


class LeastWork(NamedTuple):
    """FLOPs, and bytes through memory."""

    flops: float
    bytes: float


def least_work(shard: Shard, work: StepWork) -> LeastWork:
    """FLOPs: two for each weight and token, and four for each value of a query and each key that it sees.

    Bytes: each weight once (of embeddings none), the keys and values that are seen, and those that are written. What
    goes from one operation to the next is not counted, for it may stay in a cache.
    """
    if not work.num_tokens:
        return LeastWork(0.0, 0.0)
    layers, weights = shard.model.num_layers, shard.model.num_layers * shard.layer_weights
    output_layer = shard.model.hidden_size * shard.vocab_size
    pairs = work.attention_pairs + work.generation_kv_tokens
    flops = 2.0 * (work.num_tokens * weights + work.outputs * output_layer) + 4.0 * layers * shard.query_size * pairs
    keys = work.context_kv_tokens + work.generation_kv_tokens + work.num_tokens
    moved = weights * shard.weight_bytes + keys * layers * shard.kv_bytes_per_token_and_layer
    return LeastWork(flops, moved + (output_layer * shard.compute_bytes if work.outputs else 0.0))
