"""The cost model: the time of an iteration as a sum over the operations of a transformer."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import NANOSECONDS
from ifbbench.simulated.hardware import HardwareProfile
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import OperationCost, StepWork, StepWorks

# In one layer: norm, QKV, rotary embedding and cache write, attention, output, norm, gate and up, activation, down.
KERNELS_PER_LAYER = 9
# Norms of queries and keys, where a model has them, which then are not fused with the rotary embedding.
QUERY_KEY_NORM_KERNELS = 3
# A mixture of experts has these too: router, choice of the experts, sorting tokens by expert, adding up their outputs.
EXPERT_KERNELS = 4
ALL_REDUCES_PER_LAYER = 2
# Embedding, last norm, output layer and sampling.
KERNELS_OUTSIDE_LAYERS = 8
# A logit is written in 16 bits, cast to 32 (read and written) and read to find the largest.
SAMPLING_BYTES_PER_LOGIT = 12
# In generation, the arithmetic of up to four query heads is hidden behind reading the key and value head that they
# share; each further one adds this share of the reading time. One value fits Hopper, Ampere and Ada.
HIDDEN_QUERY_HEADS = 4
COST_OF_FURTHER_HEAD = 0.08


class _Times(dict[int, float]):
    """Nanoseconds of operations together, by number of tokens. Computed once each, because the same numbers recur."""

    def __init__(self, operations: Callable[[int], tuple[OperationCost, ...]]) -> None:
        self._operations = operations

    def __missing__(self, tokens: int) -> float:
        self[tokens] = time_ns = NANOSECONDS * sum([operation.seconds for operation in self._operations(tokens)], 0.0)
        return time_ns


class CostModel:
    """The time of one iteration of a model, divided as in `shard`, on `hardware`: the sum over its operations.

    - A matrix product computes and moves bytes: its weights once per iteration, whatever the batch. The two overlap in
      part: it takes the root of the sum of their squares, close to the longer one.
    - The MLPs of a mixture of experts read the weights of the experts that are expected to be hit by any token.
    - The time of context attention is proportional to query-key pairs, so it is quadratic in the prompt length.
    - The time of generation attention is proportional to the keys and values that it reads.
    - Embedding, norms, rotary embedding, activation and sampling move bytes.
    - Between devices there are two all-reduces per layer, and the transfer to the next pipeline stage.
    - Each kernel takes a fixed time to start. Without a CUDA graph, as in every iteration with context, an iteration
      takes at least as long as the host needs to launch the kernels one by one.

    The host's time to schedule an iteration is added, or hidden with overlap: see `host_ns`.
    InputError for a data type of weights that the hardware does not compute in.
    """

    def __init__(self, shard: Shard, hardware: HardwareProfile, cuda_graphs: bool = True) -> None:
        hardware.check_dtype(shard.dtype)
        self.shard = shard
        self.hardware = hardware
        self._cuda_graphs = cuda_graphs
        model, share = shard.model, hardware.constants
        self._flops_per_s = hardware.matmul_flops_per_s("fp8" if shard.dtype == "fp8" else shard.compute_dtype)
        self._output_flops_per_s = hardware.matmul_flops_per_s(shard.compute_dtype)
        self._bytes_per_s = share.memory * hardware.memory_bandwidth
        self._network_bytes_per_s = share.network * hardware.link_bandwidth
        per_layer = KERNELS_PER_LAYER + QUERY_KEY_NORM_KERNELS * model.query_key_norm
        per_layer += EXPERT_KERNELS * (model.num_experts > 0)
        self._kernels = model.num_layers * per_layer + KERNELS_OUTSIDE_LAYERS * shard.pp_size
        self._context_ns = share.context_s * NANOSECONDS
        all_reduces = model.num_layers * ALL_REDUCES_PER_LAYER * (shard.tp_size > 1)
        self.launch_ns = share.launch_s * (self._kernels + all_reduces) * NANOSECONDS

        self._kv_bytes_per_token = model.num_layers * shard.kv_bytes_per_token_and_layer
        self._flops_per_pair = 4.0 * model.num_layers * shard.query_size
        attention_flops_per_s = share.context_attention * hardware.peak_flops[shard.attention_dtype]
        self._ns_per_pair = self._flops_per_pair / attention_flops_per_s * NANOSECONDS
        self._ns_per_context_kv_token = self._kv_bytes_per_token / self._bytes_per_s * NANOSECONDS
        further_heads = max(0, shard.query_size // shard.kv_size - HIDDEN_QUERY_HEADS)
        reading_s = self._kv_bytes_per_token / (share.generation_attention * hardware.memory_bandwidth)
        self._ns_per_kv_token = reading_s * (1 + COST_OF_FURTHER_HEAD * further_heads) * NANOSECONDS
        self._host_s = (hardware.host_iteration_s, hardware.host_request_s, hardware.host_prompt_token_s)
        self._tokens_ns = _Times(self.of_tokens)
        self._outputs_ns = _Times(self.of_outputs)

    # The time of an iteration.

    def device_ns(self, work: StepWork) -> int:
        """Nanoseconds of the devices for a batch, from its start in the first stage to its end in the last."""
        busy = self._tokens_ns[work.context_tokens + work.generation_tokens] + self._outputs_ns[work.outputs]
        busy += work.generation_kv_tokens * self._ns_per_kv_token
        if work.context_tokens:
            busy += self._context_attention_ns(work) + self._context_ns
        elif self._cuda_graphs:
            return round(busy)
        return round(max(busy, self.launch_ns))

    def stages_ns(self, work: StepWork) -> list[int]:
        """`device_ns`, divided among the pipeline stages in the order in which a batch passes through them.

        Each stage has its share of the layers, the first ones one more where they cannot be divided evenly; the last
        stage also computes the logits and samples."""
        return self.divided_ns(self.device_ns(work), work.outputs)

    def divided_ns(self, whole_ns: int, outputs: int) -> list[int]:
        """The time of a batch with logits for so many rows, divided among the pipeline stages."""
        stages, layers = self.shard.pp_size, self.shard.model.num_layers
        if stages == 1:
            return [whole_ns]
        outputs_ns = min(round(self._outputs_ns[outputs]), whole_ns)
        ends = [(whole_ns - outputs_ns) * (stage * layers // stages) // layers for stage in range(1, stages + 1)]
        times = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        times[-1] += outputs_ns
        return times

    def generation_ns(self, generation_tokens: int, kv_tokens: Sequence[int]) -> list[int]:
        """`device_ns` of many iterations without context, [iterations].

        generation_tokens: of each iteration. kv_tokens: [iterations], their `generation_kv_tokens`."""
        busy = self._tokens_ns[generation_tokens] + self._outputs_ns[generation_tokens]
        per_token, at_least = self._ns_per_kv_token, 0.0 if self._cuda_graphs else self.launch_ns
        return [round(max(busy + tokens * per_token, at_least)) for tokens in kv_tokens]

    def times_ns(self, works: StepWorks) -> NDArray[np.float64]:
        """`device_ns` of many iterations at once, [iterations], exactly; 0 of those without work."""
        numbers, rows = np.unique(works.context_tokens + works.generation_tokens, return_inverse=True)
        busy = np.array([self._tokens_ns[number] if number else 0.0 for number in numbers.tolist()])[rows]
        numbers, rows = np.unique(works.outputs, return_inverse=True)
        busy += np.array([self._outputs_ns[number] for number in numbers.tolist()])[rows]
        busy += works.generation_kv_tokens * self._ns_per_kv_token
        has_context = works.context_tokens > 0
        by_pairs, by_keys = works.attention_pairs * self._ns_per_pair, works.context_kv_tokens
        attention_ns = np.maximum(by_pairs, by_keys * self._ns_per_context_kv_token)
        busy += np.where(has_context, attention_ns + self._context_ns, 0.0)
        launched = has_context | (works.generation_tokens > 0 if not self._cuda_graphs else False)
        rounded: NDArray[np.float64] = np.rint(np.where(launched, np.maximum(busy, self.launch_ns), busy))
        return rounded

    def host_ns(self, num_requests: int, context_tokens: int = 0) -> int:
        """Nanoseconds of the host to schedule an iteration of `num_requests` and to prepare its inputs."""
        per_iteration_s, per_request_s, per_token_s = self._host_s
        return round((per_iteration_s + num_requests * per_request_s + context_tokens * per_token_s) * NANOSECONDS)

    def operations(self, work: StepWork) -> tuple[OperationCost, ...]:
        """The parts of `device_ns`, in the order of the forward pass."""
        embedding, qkv, *others, kernel_starts = self.of_tokens(work.num_tokens)
        # Preparation that only iterations with context need.
        context_s = self.hardware.constants.context_s if work.context_tokens else 0.0
        done = (
            embedding,
            qkv,
            self._context_attention(work),
            self._generation_attention(work),
            *others,
            *self.of_outputs(work.outputs),
            kernel_starts,
            OperationCost("context start", 0, 0, context_s, "latency"),
        )
        with_launches = work.context_tokens > 0 or not self._cuda_graphs
        waited = self.launch_ns / NANOSECONDS - sum([operation.seconds for operation in done], 0.0)
        waiting = OperationCost("waiting for launches", 0, 0, max(waited, 0.0) if with_launches else 0.0, "launch")
        return (*done, waiting)

    # Operations that depend on the numbers of tokens and outputs only.

    def of_tokens(self, tokens: int) -> tuple[OperationCost, ...]:
        """Operations on all tokens, in the order of the forward pass."""
        shard, hidden = self.shard, self.shard.model.hidden_size
        # Two norms with residual, rotary embedding with cache write, and the activation, in each layer. What fits the
        # last-level cache from one kernel to the next does not move through memory.
        norms = 2 * hidden * (3 * shard.compute_bytes + shard.input_bytes)
        rotary = 2 * (shard.query_size + shard.kv_size) * shard.compute_bytes + shard.kv_bytes_per_token_and_layer
        activation = shard.gate_up_size * shard.compute_bytes + shard.intermediate_size * shard.input_bytes
        activation *= shard.mlps_per_token
        beyond_cache = max(0.0, tokens * (norms + rotary + activation) - self.hardware.cache_bytes)
        transferred = (shard.pp_size - 1) * tokens * hidden * shard.compute_bytes
        kernel_starts_s = self._kernels * self.hardware.constants.kernel_s
        experts, rows, mlps = shard.model.num_experts, tokens * shard.mlps_per_token, shard.experts_read(tokens)
        return (
            self._moving("embedding", 2 * tokens * hidden * shard.compute_bytes),
            self._layer_product("QKV product", tokens, hidden, shard.query_size + 2 * shard.kv_size),
            self._layer_product("attention output product", tokens, shard.query_size, hidden),
            *([self._layer_product("router", tokens, hidden, shard.model.num_experts)] if experts else ()),
            self._layer_product("gate and up product", rows, hidden, shard.gate_up_size, mlps),
            self._layer_product("down product", rows, shard.intermediate_size, hidden, mlps),
            self._moving("element-wise", shard.model.num_layers * beyond_cache),
            self._all_reduces(tokens),
            OperationCost("pipeline transfer", 0, transferred, transferred / self._network_bytes_per_s, "network"),
            OperationCost("kernel starts", 0, 0, kernel_starts_s, "latency"),
        )

    def of_outputs(self, outputs: int) -> tuple[OperationCost, ...]:
        """Logits and sampling of `outputs` tokens. The weights of the output layer stay in 16 bits."""
        hidden, vocabulary = self.shard.model.hidden_size, self.shard.vocab_size
        moved = (hidden * vocabulary + outputs * (hidden + vocabulary)) * self.shard.compute_bytes
        return (
            self._product("output layer", 2.0 * outputs * hidden * vocabulary, moved, self._output_flops_per_s),
            self._moving("sampling", outputs * self.shard.model.vocab_size * SAMPLING_BYTES_PER_LOGIT),
        )

    def _layer_product(self, name: str, tokens: int, inputs: int, outputs: int, matrices: float = 1.0) -> OperationCost:
        """[tokens, inputs] × [inputs, outputs] in every layer. matrices: number of them that share the tokens."""
        shard, layers = self.shard, self.shard.model.num_layers
        weights = matrices * inputs * outputs * shard.weight_bytes
        activations = tokens * (inputs * shard.input_bytes + outputs * shard.compute_bytes)
        flops = 2.0 * tokens * inputs * outputs
        return self._product(name, layers * flops, layers * (weights + activations), self._flops_per_s)

    def _product(self, name: str, flops: float, moved: float, flops_per_s: float) -> OperationCost:
        """A matrix product; without rows it takes no time."""
        if not flops:
            return OperationCost(name, 0, 0, 0.0, "memory")
        compute, memory = flops / flops_per_s, moved / self._bytes_per_s
        limit = "compute" if compute > memory else "memory"
        return OperationCost(name, flops, moved, math.hypot(compute, memory), limit)

    def _moving(self, name: str, moved: float) -> OperationCost:
        return OperationCost(name, 0, moved, moved / self._bytes_per_s, "memory")

    def _all_reduces(self, tokens: int) -> OperationCost:
        """By the quicker of two algorithms. Both take a latency and the time of the bytes that a device moves.

        A ring takes a latency for every doubling of the devices, and moves 2 (n − 1) / n of the message. In one shot
        each device reads the message of all others, n − 1 of them, which is quicker for few tokens."""
        tp_size, share = self.shard.tp_size, self.hardware.constants
        if tp_size == 1 or not tokens:
            return OperationCost("all-reduces", 0, 0, 0.0, "network")
        count = ALL_REDUCES_PER_LAYER * self.shard.model.num_layers
        message = tokens * self.shard.model.hidden_size * self.shard.compute_bytes
        algorithms = (
            (share.all_reduce_s * math.log2(tp_size), 2 * (tp_size - 1) / tp_size * message, share.network),
            (share.one_shot_s + share.one_shot_gpu_s * tp_size, (tp_size - 1) * message, share.one_shot),
        )
        latency, moved, reached = min(
            algorithms, key=lambda one: one[0] + one[1] / (one[2] * self.hardware.link_bandwidth)
        )
        flow = moved / (reached * self.hardware.link_bandwidth)
        limit = "network" if flow > latency else "latency"
        return OperationCost("all-reduces", 0, count * moved, count * (latency + flow), limit)

    # Attention, which depends on the positions of the tokens in their sequences.

    def _context_attention(self, work: StepWork) -> OperationCost:
        flops, moved = work.attention_pairs * self._flops_per_pair, work.context_kv_tokens * self._kv_bytes_per_token
        by_compute = work.attention_pairs * self._ns_per_pair > work.context_kv_tokens * self._ns_per_context_kv_token
        seconds = self._context_attention_ns(work) / NANOSECONDS
        return OperationCost("context attention", flops, moved, seconds, "compute" if by_compute else "memory")

    def _context_attention_ns(self, work: StepWork) -> float:
        return max(work.attention_pairs * self._ns_per_pair, work.context_kv_tokens * self._ns_per_context_kv_token)

    def _generation_attention(self, work: StepWork) -> OperationCost:
        keys = work.generation_kv_tokens
        seconds = keys * self._ns_per_kv_token / NANOSECONDS
        moved = keys * self._kv_bytes_per_token
        return OperationCost("generation attention", keys * self._flops_per_pair, moved, seconds, "memory")
