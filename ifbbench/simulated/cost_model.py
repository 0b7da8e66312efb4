"""The cost model: the time of an iteration as a sum over the operations of a transformer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import NANOSECONDS
from ifbbench.models.layers import Mixer, Mlp
from ifbbench.simulated.hardware import HardwareProfile
from ifbbench.simulated.interconnect import NETWORK_SHARE, Interconnect
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import OperationCost, StepWork, StepWorks

# Norm, QKV, rotary embedding and cache write, attention, output; and norm, gate and up, activation, down.
MIXER_KERNELS, MLP_KERNELS = 5, 4
# Latent attention has these too: norms of compressed queries and latent vectors, the products behind them, and in its
# absorbed form one each for queries and outputs.
LATENT_KERNELS = 4
# Norm, two projections, convolution, state, norm with gate, output.
RECURRENT_KERNELS = 7
# Norms of queries and keys, where a model has them, which then are not fused with the rotary embedding.
QUERY_KEY_NORM_KERNELS = 3
# A mixture of experts has these too: router, choice of the experts, sorting tokens by expert, adding up their outputs.
EXPERT_KERNELS = 4
# Gate and up, activation, down.
SHARED_EXPERT_KERNELS = 3
# With a scale for each block, activations are quantized before each product, by a kernel of its own. Those of dense
# models are in `kernel_s`, which was fitted to such.
LATENT_PRODUCTS, EXPERT_PRODUCTS = 4, 2
# Embedding, last norm, output layer and sampling.
KERNELS_OUTSIDE_LAYERS = 8
# A logit is written in 16 bits, cast to 32 (read and written) and read to find the largest.
SAMPLING_BYTES_PER_LOGIT = 12
# In generation, the arithmetic of up to four query heads is hidden behind reading the key and value head that they
# share; each further one adds this share of the reading time. One value fits Hopper, Ampere and Ada.
HIDDEN_QUERY_HEADS = 4
COST_OF_FURTHER_HEAD = 0.08
# A hidden state on the way to experts has 8 bits, with a scale for each 128 values, beside weights of 8 bits or fewer.
DISPATCH_BYTES = 1 + 4 / 128
ATTENTION_OUTPUT = "attention output product"
ROUTER = "router"
EXPERT_ROWS = "expert rows"
ALL_TO_ALL = ("expert dispatch", "expert combine")


class _Times(dict[int, float]):
    """Nanoseconds of operations together, by number of tokens. Computed once each, because the same numbers recur."""

    def __init__(self, operations: Callable[[int], tuple[OperationCost, ...]]) -> None:
        self._operations = operations

    def __missing__(self, tokens: int) -> float:
        self[tokens] = time_ns = NANOSECONDS * sum([operation.seconds for operation in self._operations(tokens)], 0.0)
        return time_ns


# Share of the host link's bandwidth that copies from pinned memory reach: 54 GB/s of the 64 of PCIe 5, for instance.
HOST_LINK_SHARE = 0.85


class CostModel:
    """The time of one iteration of a model, divided as in `shard`, on `hardware`: the sum over its operations.

    - A matrix product computes and moves bytes: its weights once per iteration, whatever the batch. The two overlap in
      part: it takes the root of the sum of their squares, close to the longer one.
    - Experts read the weights of those that are expected to be hit by any token. With expert parallelism the part with
      the most rows and experts decides. Each row, a token for one expert, is copied before the products and added to
      the others of its token afterwards, which takes a time of its own.
    - Latent attention is expanded in the context phase and absorbed in generation, see `LatentAttention`.
    - Recurrent layers read and write the state of each request.
    - The time of context attention is proportional to query-key pairs, so it is quadratic in the prompt length.
    - The time of generation attention is proportional to the keys and values that it reads.
    - Embedding, norms, rotary embedding, activation and sampling move bytes.
    - Between devices there are two all-reduces per layer, and the transfer to the next pipeline stage. With attention
      data parallelism tokens are exchanged between experts instead. Work is then that of the part with the most, to
      whose number of tokens the others are padded.
    - With two-batch overlap each half of the tokens passes through the layers by itself, and the exchange of one half
      is hidden behind the computation of the other.
    - Each kernel takes a fixed time to start. Without a CUDA graph, as in every iteration with context, an iteration
      takes at least as long as the host needs to launch the kernels one by one.

    The host's time to schedule an iteration is added, or hidden with overlap: see `host_ns`.
    InputError for a data type of weights that the hardware does not compute in.
    """

    def __init__(
        self,
        shard: Shard,
        hardware: HardwareProfile,
        cuda_graphs: bool = True,
        two_batches: bool = False,
        draft_len: int = 0,
    ) -> None:
        """two_batches: whether iterations run as two overlapping batches.
        draft_len: number of draft tokens of each generation request.
        """
        hardware.check_dtype(shard.dtype)
        self.shard = shard
        self.hardware = hardware
        self._cuda_graphs = cuda_graphs
        self._two_batches = two_batches and shard.attention_dp_size > 1 and shard.model.num_experts > 0
        model, share = shard.model, hardware.constants
        self._output_flops_per_s = hardware.matmul_flops_per_s(shard.compute_dtype)
        self._bytes_per_s = share.memory * hardware.memory_bandwidth
        self._expert_bytes_per_s = share.experts_memory * hardware.memory_bandwidth
        self.interconnect = Interconnect(hardware)
        self._experts = shard.experts if model.num_experts else None
        # By part of a layer: in how many layers it is, bytes of its weights, and FLOP/s of its products.
        parts: tuple[Mixer | Mlp, ...] = (*Mixer, *Mlp)
        self._kinds = tuple(model.kinds.items())
        self._counts = {part: model.count(part) for part in parts}
        self._weight_bytes = {part: shard.weight_bytes_of(part) for part in parts}
        self._flops_per_s = {part: hardware.matmul_flops_per_s(shard.dtype_of(part)) for part in parts}
        self._expert_flops_per_s = self._flops_per_s[Mlp.EXPERTS] * share.experts
        self._has_row_times = share.expert_row_s + share.listed_row_s > 0
        self._quantize_s = share.quantize_s if shard.dtype == "fp8_block" else 0.0
        self._value_bytes = shard.input_bytes, shard.compute_bytes
        self._context_ns = share.context_s * NANOSECONDS
        halves = 2 if self._two_batches else 1
        of_experts = halves * self._kernels_of(Mlp.EXPERTS)
        kernels = halves * self._kernels_of(Mlp.DENSE, Mlp.NONE) + KERNELS_OUTSIDE_LAYERS * shard.pp_size
        self._kernel_starts_s = kernels * share.kernel_s + of_experts * share.expert_kernel_s
        launch_s = share.launch_s * (kernels + of_experts + self._all_reduce_count())
        launch_s += halves * self._counts[Mlp.EXPERTS] * share.expert_launch_s
        self.launch_ns = launch_s * NANOSECONDS

        attention_layers, latent = len(model.attention_layers), model.latent
        self._kv_bytes_per_token = attention_layers * shard.kv_bytes_per_token_and_layer
        self._flops_per_pair = 4.0 * attention_layers * shard.query_size
        self._flops_per_kv_token = self._flops_per_pair
        further_heads = max(0, shard.query_size // shard.kv_size - HIDDEN_QUERY_HEADS)
        reading_s = self._kv_bytes_per_token / (share.generation_attention * hardware.memory_bandwidth)
        self._ns_per_kv_token = reading_s * (1 + COST_OF_FURTHER_HEAD * further_heads) * NANOSECONDS
        self._ns_per_cached_token = 0.0  # of a prompt, whose keys and values are expanded from latent vectors
        if latent is not None:
            self._flops_per_pair = 2.0 * attention_layers * shard.heads * (latent.nope + latent.rope + latent.value)
            per_key = 2.0 * attention_layers * shard.heads * (latent.cached + latent.kv_rank)
            self._flops_per_kv_token = (1 + draft_len) * per_key
            absorbed = share.latent_attention * hardware.peak_flops[shard.attention_dtype]
            self._ns_per_kv_token = math.hypot(reading_s, self._flops_per_kv_token / absorbed) * NANOSECONDS
            expansion = 2.0 * attention_layers * latent.kv_rank * shard.heads * (latent.nope + latent.value)
            self._ns_per_cached_token = expansion / self._flops_per_s[Mixer.ATTENTION] * NANOSECONDS
        attention_flops_per_s = share.context_attention * hardware.peak_flops[shard.attention_dtype]
        self._ns_per_pair = self._flops_per_pair / attention_flops_per_s * NANOSECONDS
        self._ns_per_context_kv_token = self._kv_bytes_per_token / self._bytes_per_s * NANOSECONDS
        # Each state is read and written in every iteration of its request.
        layers, devices = self._counts[Mixer.RECURRENT], shard.attention_tp_size
        self._state_bytes = self._state_flops = 0.0
        if model.recurrent is not None:
            self._state_bytes = 2 * layers * model.recurrent.bytes_per_request(shard.compute_bytes) / devices
            self._state_flops = layers * model.recurrent.flops_per_token / devices
        self._host_s = (hardware.host_iteration_s, hardware.host_request_s, hardware.host_prompt_token_s)
        self._tokens_ns = _Times(self._busy_with)
        self._network_ns = _Times(self._exchanges)
        self._outputs_ns = _Times(self.of_outputs)

    def _kernels_of(self, *mlps: Mlp) -> int:
        """Kernels that start in all layers with one of these MLPs."""
        model, blocks = self.shard.model, self.shard.dtype == "fp8_block"
        of_mixer = {
            Mixer.NONE: 0,
            Mixer.ATTENTION: MIXER_KERNELS + QUERY_KEY_NORM_KERNELS * model.query_key_norm,
            Mixer.RECURRENT: RECURRENT_KERNELS,
        }
        of_mixer[Mixer.ATTENTION] += (LATENT_KERNELS + LATENT_PRODUCTS * blocks) * (model.latent is not None)
        has_shared = model.shared_expert_size > 0
        of_experts = MLP_KERNELS + EXPERT_KERNELS + SHARED_EXPERT_KERNELS * has_shared
        of_experts += EXPERT_PRODUCTS * (1 + has_shared) * blocks
        of_experts += len(ALL_TO_ALL) * (self.shard.attention_dp_size > 1)
        of_mlp = {Mlp.NONE: 0, Mlp.DENSE: MLP_KERNELS, Mlp.EXPERTS: of_experts}
        return sum(
            [count * (of_mixer[kind.mixer] + of_mlp[kind.mlp]) for kind, count in self._kinds if kind.mlp in mlps]
        )

    def _all_reduce_count(self) -> int:
        """All-reduces in all layers: after each mixer and MLP, but for experts whose tokens are exchanged."""
        shard = self.shard
        if shard.attention_tp_size == 1:
            return 0
        parts: list[Mixer | Mlp] = [Mixer.ATTENTION, Mixer.RECURRENT, Mlp.DENSE]
        parts += [Mlp.EXPERTS] if shard.attention_dp_size == 1 else []
        return sum([self._counts[part] for part in parts])

    # The time of an iteration.

    def device_ns(self, work: StepWork) -> int:
        """Nanoseconds of the devices for a batch, from its start in the first stage to its end in the last."""
        busy = self._tokens_ns[work.context_tokens + work.generation_tokens] + self._outputs_ns[work.outputs]
        busy += work.generation_kv_tokens * self._ns_per_kv_token
        if self._state_bytes:
            busy += self._states_ns(work)
        if work.context_tokens:
            busy += self._context_attention_ns(work) + self._context_ns
        if self._two_batches:
            busy = max(busy, self._network_ns[work.num_tokens])
        if not work.context_tokens and self._cuda_graphs:
            return round(busy)
        return round(max(busy, self.launch_ns))

    def of_largest(self, works: Sequence[StepWork]) -> StepWork:
        """The work of an iteration that parts of the devices run together: of each kind that of the part with most.

        Parts wait for each other in every layer: for the slowest attention, and tokens are padded to the most."""
        if len(works) == 1:
            return works[0]
        slowest = max(
            works, key=lambda one: self._context_attention_ns(one) + one.generation_kv_tokens * self._ns_per_kv_token
        )
        context_tokens = max([one.context_tokens for one in works])
        return StepWork(
            context_tokens,
            max([one.context_requests for one in works]),
            slowest.attention_pairs,
            max(slowest.context_kv_tokens, context_tokens),
            max([one.num_tokens for one in works]) - context_tokens,
            slowest.generation_kv_tokens,
            max([one.outputs for one in works]),
        )

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

        generation_tokens: number of tokens of each iteration.
        kv_tokens: [iterations], `generation_kv_tokens` of each.
        """
        busy = self._tokens_ns[generation_tokens] + self._outputs_ns[generation_tokens]
        if self._state_bytes:
            busy += self._states_ns(StepWork(generation_tokens=generation_tokens))
        per_token, at_least = self._ns_per_kv_token, 0.0 if self._cuda_graphs else self.launch_ns
        if self._two_batches:
            at_least = max(at_least, self._network_ns[generation_tokens])
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
        if self._ns_per_cached_token:
            attention_ns = attention_ns + (by_keys - works.context_tokens) * self._ns_per_cached_token
        if self._state_bytes:
            busy += [self._states_ns(StepWork(*row)) for row in zip(*(each.tolist() for each in works), strict=True)]
        busy += np.where(has_context, attention_ns + self._context_ns, 0.0)
        if self._two_batches:
            numbers, rows = np.unique(works.context_tokens + works.generation_tokens, return_inverse=True)
            network = np.array([self._network_ns[number] if number else 0.0 for number in numbers.tolist()])
            busy = np.maximum(busy, network[rows])
        launched = has_context | (works.generation_tokens > 0 if not self._cuda_graphs else False)
        rounded: NDArray[np.float64] = np.rint(np.where(launched, np.maximum(busy, self.launch_ns), busy))
        return rounded

    def host_ns(self, num_requests: int, context_tokens: int = 0) -> int:
        """Nanoseconds of the host to schedule an iteration of `num_requests` and to prepare its inputs."""
        per_iteration_s, per_request_s, per_token_s = self._host_s
        return round((per_iteration_s + num_requests * per_request_s + context_tokens * per_token_s) * NANOSECONDS)

    def load_ns(self, tokens: int) -> int:
        """Nanoseconds in which keys and values of so many tokens are copied from host memory, all layers of a stage."""
        moved = tokens * self.shard.kv_bytes_per_token
        return round(moved / (HOST_LINK_SHARE * self.hardware.host_link_bandwidth) * NANOSECONDS)

    def operations(self, work: StepWork) -> tuple[OperationCost, ...]:
        """The parts of `device_ns`, in the order of the forward pass."""
        *operations, kernel_starts = self.of_tokens(work.num_tokens)
        at = next((index for index, one in enumerate(operations) if one.name == ATTENTION_OUTPUT), len(operations))
        # Preparation that only iterations with context need.
        context_s = self.hardware.constants.context_s if work.context_tokens else 0.0
        done = (
            *operations[:at],
            *self.of_attention(work),
            *operations[at:],
            *self.of_outputs(work.outputs),
            kernel_starts,
            OperationCost("context start", 0, 0, context_s, "latency"),
        )
        if self._two_batches:
            done = self._with_hidden(done)
        with_launches = work.context_tokens > 0 or not self._cuda_graphs
        waited = self.launch_ns / NANOSECONDS - sum([operation.seconds for operation in done], 0.0)
        waiting = OperationCost("waiting for launches", 0, 0, max(waited, 0.0) if with_launches else 0.0, "launch")
        return (*done, waiting)

    def _with_hidden(self, operations: tuple[OperationCost, ...]) -> tuple[OperationCost, ...]:
        """`operations` with only the part of exchanges that is not hidden behind the others."""
        exchanged = sum([one.seconds for one in operations if one.name in ALL_TO_ALL], 0.0)
        others = sum([one.seconds for one in operations], 0.0) - exchanged
        left = max(0.0, exchanged - others) / exchanged if exchanged else 0.0
        return tuple(replace(one, seconds=one.seconds * left) if one.name in ALL_TO_ALL else one for one in operations)

    def of_attention(self, work: StepWork) -> tuple[OperationCost, ...]:
        """Attention of both phases, and the states of recurrent layers."""
        return (
            self._context_attention(work),
            self._generation_attention(work),
            *([self._states(work)] if self._state_bytes else ()),
        )

    # Operations that depend on the numbers of tokens and outputs only.

    def of_tokens(self, tokens: int) -> tuple[OperationCost, ...]:
        """Operations on all tokens, in the order of the forward pass. With two-batch overlap those of both halves."""
        if self._two_batches and tokens > 1:
            half, other = self._of_half(tokens - tokens // 2), self._of_half(tokens // 2)
            *operations, _ = (
                OperationCost(a.name, a.flops + b.flops, a.bytes + b.bytes, a.seconds + b.seconds, a.limit)
                for a, b in zip(half, other, strict=True)
            )
        else:
            *operations, _ = self._of_half(tokens)
        return (*operations, OperationCost("kernel starts", 0, 0, self._kernel_starts_s, "latency"))

    def _busy_with(self, tokens: int) -> tuple[OperationCost, ...]:
        """`of_tokens`, without what two-batch overlap hides."""
        operations = self.of_tokens(tokens)
        return tuple(one for one in operations if one.name not in ALL_TO_ALL) if self._two_batches else operations

    def _exchanges(self, tokens: int) -> tuple[OperationCost, ...]:
        """The exchanges among `of_tokens`."""
        return tuple(one for one in self.of_tokens(tokens) if one.name in ALL_TO_ALL)

    def _of_half(self, tokens: int) -> tuple[OperationCost, ...]:
        """Operations on tokens that pass through the layers together; the last is a place for the starts of kernels."""
        shard, hidden = self.shard, self.shard.model.hidden_size
        message = tokens * hidden * shard.compute_bytes
        return (
            self._moving("embedding", 2 * tokens * hidden * shard.compute_bytes),
            *self._mixer_products(tokens),
            *self._mlp_products(tokens),
            self._moving("element-wise", self._beyond_cache(tokens)),
            self._all_reduces(tokens),
            *self._all_to_all(tokens),
            self._stage_transfers(message),
            OperationCost("", 0, 0, 0.0, "latency"),
        )

    def _mixer_products(self, tokens: int) -> list[OperationCost]:
        """The products of attention and of recurrent layers; of the former the last one is the output's."""
        shard, model, hidden, found = self.shard, self.shard.model, self.shard.model.hidden_size, list[OperationCost]()
        if model.is_draft:
            size = hidden // shard.attention_tp_size
            found.append(
                self._layer_product("draft input product", Mixer.ATTENTION, tokens, 2 * hidden, size, layers=1)
            )
        if model.recurrent is not None:
            recurrent, parts = model.recurrent, shard.attention_tp_size
            others = [(hidden, recurrent.projected), *recurrent.between]
            found += [
                self._layer_product("recurrent layer products", Mixer.RECURRENT, tokens, inputs, outputs // parts)
                for inputs, outputs in others
            ]
            found.append(
                self._layer_product(
                    "recurrent layer products", Mixer.RECURRENT, tokens, recurrent.inner // parts, hidden
                )
            )
            found = [_together(found)]
        if not self._counts[Mixer.ATTENTION]:
            return found
        query_size = shard.query_size
        if (latent := model.latent) is not None:
            heads = shard.heads * (latent.nope + latent.rope)
            query_size = shard.heads * latent.value
            first = (latent.query_rank or heads) + latent.cached
            found.append(self._layer_product("QKV product", Mixer.ATTENTION, tokens, hidden, first))
            if latent.query_rank:
                found.append(self._layer_product("query up product", Mixer.ATTENTION, tokens, latent.query_rank, heads))
            # In the context phase from latent vectors to keys and values; in generation from queries to latent vectors,
            # and from these to outputs: as much arithmetic by the same matrices.
            up = shard.heads * (latent.nope + latent.value)
            found.append(self._layer_product("latent up product", Mixer.ATTENTION, tokens, latent.kv_rank, up))
        else:
            outputs = (1 + model.gated_attention) * query_size + 2 * shard.kv_size
            found.append(self._layer_product("QKV product", Mixer.ATTENTION, tokens, hidden, outputs))
        found.append(self._layer_product(ATTENTION_OUTPUT, Mixer.ATTENTION, tokens, query_size, hidden))
        return found

    def _mlp_products(self, tokens: int) -> list[OperationCost]:
        """The products of MLPs that all tokens pass, of routed experts and of shared ones."""
        shard, model, hidden, found = self.shard, self.shard.model, self.shard.model.hidden_size, list[OperationCost]()
        if self._counts[Mlp.DENSE]:
            found = [
                self._layer_product("gate and up product", Mlp.DENSE, tokens, hidden, shard.gate_up_size),
                self._layer_product("down product", Mlp.DENSE, tokens, shard.intermediate_size, hidden),
            ]
        if self._experts is None:
            return found
        of_all = tokens * shard.attention_dp_size
        rows, hit, size = self._experts.rows(of_all), self._experts.hit(of_all), shard.expert_size
        found += [
            self._layer_product(ROUTER, Mlp.EXPERTS, tokens, hidden, model.num_experts),
            self._expert_product("expert gate and up product", rows, hidden, model.up_products * size, hit),
            self._expert_product("expert down product", rows, size, hidden, hit),
        ]
        if self._has_row_times:
            found.append(self._expert_rows(of_all, rows))
        if size := shard.shared_expert_size:
            both, layers = model.up_products * size, self._counts[Mlp.EXPERTS]
            found += [
                self._layer_product("shared expert gate and up", Mlp.SHARED, tokens, hidden, both, layers),
                self._layer_product("shared expert down", Mlp.SHARED, tokens, size, hidden, layers),
            ]
        return found

    def _beyond_cache(self, tokens: int) -> float:
        """Bytes that norms with residual, rotary embedding with cache write, convolutions and activations of all layers
        move. What fits the last-level cache from one kernel to the next does not move through memory."""
        shard, model, moved = self.shard, self.shard.model, 0.0
        input_bytes, compute_bytes = self._value_bytes
        for kind, count in self._kinds:
            parts = (kind.mixer is not Mixer.NONE) + (kind.mlp is not Mlp.NONE)
            norms = parts * model.hidden_size * (3 * compute_bytes + input_bytes)
            mixing = activation = 0.0
            if kind.mixer is Mixer.RECURRENT and model.recurrent is not None:
                channels = 2 * (model.recurrent.conv_channels + model.recurrent.inner)
                mixing = channels / shard.attention_tp_size * compute_bytes
            elif kind.mixer is Mixer.ATTENTION:
                kept = shard.kv_bytes_per_token_and_layer
                if (latent := model.latent) is None:
                    mixing = 2 * (shard.query_size + shard.kv_size) * compute_bytes + kept
                else:
                    heads = shard.heads * (2 * (latent.nope + latent.rope) + latent.value)
                    mixing = (2 * (latent.query_rank + latent.cached) + heads) * compute_bytes + kept
            if kind.mlp is Mlp.DENSE:
                activation = shard.gate_up_size * compute_bytes + shard.intermediate_size * input_bytes
            elif kind.mlp is Mlp.EXPERTS:
                activation = model.up_products * shard.expert_size * compute_bytes + shard.expert_size * input_bytes
                activation *= model.experts_per_token * shard.attention_dp_size / shard.ep_size
                size = shard.shared_expert_size
                activation += model.up_products * size * compute_bytes + size * input_bytes
            moved += count * max(0.0, tokens * (norms + mixing + activation) - self.hardware.cache_bytes)
        return moved

    def of_outputs(self, outputs: int) -> tuple[OperationCost, ...]:
        """Logits and sampling of `outputs` tokens. The weights of the output layer stay in 16 bits."""
        hidden, vocabulary = self.shard.model.hidden_size, self.shard.vocab_size
        moved = (hidden * vocabulary + outputs * (hidden + vocabulary)) * self.shard.compute_bytes
        return (
            self._product(
                "output layer", 2.0 * outputs * hidden * vocabulary, moved, self._output_flops_per_s, self._bytes_per_s
            ),
            self._moving("sampling", outputs * self.shard.model.vocab_size * SAMPLING_BYTES_PER_LOGIT),
        )

    def _layer_product(
        self,
        name: str,
        part: Mixer | Mlp,
        tokens: float,
        inputs: int,
        outputs: int,
        layers: int | None = None,
    ) -> OperationCost:
        """[tokens, inputs] × [inputs, outputs] in every layer with `part`."""
        layers = self._counts[part] if layers is None else layers
        flops, moved = self._work_of_product(part, tokens, inputs, outputs, 1.0)
        done = self._product(name, layers * flops, layers * moved, self._flops_per_s[part], self._bytes_per_s)
        if self._quantize_s and name != ROUTER:
            done = replace(done, seconds=done.seconds + layers * tokens * inputs * self._quantize_s)
        return done

    def _expert_product(self, name: str, rows: float, inputs: int, outputs: int, hit: float) -> OperationCost:
        """A product of all layers with experts: `hit` routed ones of each share the rows."""
        layers = self._counts[Mlp.EXPERTS]
        flops, moved = self._work_of_product(Mlp.EXPERTS, rows, inputs, outputs, hit)
        return self._product(name, layers * flops, layers * moved, self._expert_flops_per_s, self._expert_bytes_per_s)

    def _expert_rows(self, tokens: int, rows: float) -> OperationCost:
        """Copying of `rows` to their experts, and adding up of their outputs. Some kernels also pass over the rows of
        experts on other devices, for all tokens that a device has: with exchanged tokens those with an expert there."""
        shard, share, layers = self.shard, self.hardware.constants, self._counts[Mlp.EXPERTS]
        listed = float(tokens * shard.model.experts_per_token)
        if self._experts is not None and shard.attention_dp_size > 1:
            listed *= self._experts.parts_of_token() / shard.ep_size
        values = layers * shard.model.hidden_size
        seconds = values * (rows * share.expert_row_s + listed * share.listed_row_s)
        return OperationCost(EXPERT_ROWS, 0, 2 * values * rows * shard.compute_bytes, seconds, "memory")

    def _work_of_product(
        self, part: Mixer | Mlp, tokens: float, inputs: int, outputs: int, matrices: float
    ) -> tuple[float, float]:
        """FLOPs and bytes of a product in one layer. matrices: number of them that share the tokens."""
        input_bytes, output_bytes = self._value_bytes
        weights = matrices * inputs * outputs * self._weight_bytes[part]
        activations = tokens * (inputs * input_bytes + outputs * output_bytes)
        return 2.0 * tokens * inputs * outputs, weights + activations

    def _product(self, name: str, flops: float, moved: float, flops_per_s: float, bytes_per_s: float) -> OperationCost:
        """A matrix product; without rows it takes no time."""
        if not flops:
            return OperationCost(name, 0, 0, 0.0, "memory")
        compute, memory = flops / flops_per_s, moved / bytes_per_s
        limit = "compute" if compute > memory else "memory"
        return OperationCost(name, flops, moved, math.hypot(compute, memory), limit)

    def _moving(self, name: str, moved: float) -> OperationCost:
        return OperationCost(name, 0, moved, moved / self._bytes_per_s, "memory")

    def _all_reduces(self, tokens: int) -> OperationCost:
        """See `Interconnect.all_reduce`."""
        if self.shard.attention_tp_size == 1:
            return OperationCost("all-reduces", 0, 0.0, 0.0, "network")
        count = self._all_reduce_count()
        message = tokens * self.shard.model.hidden_size * self.shard.compute_bytes
        one = self.interconnect.all_reduce(self.shard.attention_tp_size, message)
        limit = "latency" if one.flow_s <= one.latency_s and one.bytes else "network"
        return OperationCost("all-reduces", 0, count * one.bytes, count * one.seconds, limit)

    def _stage_transfers(self, message: float) -> OperationCost:
        """See `Interconnect.stage_transfers`."""
        if self.shard.pp_size == 1:
            return OperationCost("pipeline transfer", 0, 0.0, 0.0, "network")
        transfers = self.interconnect.stage_transfers(self.shard.tp_size, self.shard.pp_size, message)
        return OperationCost("pipeline transfer", 0, transfers.bytes, transfers.seconds, "network")

    def _all_to_all(self, tokens: int) -> list[OperationCost]:
        """Dispatch of tokens to the devices of their experts, and combination of what these compute, where parts of the
        devices have tokens of their own. Each token goes once to each part with one of its experts; the devices of the
        part that it comes from share the work. Messages within a node and to other nodes pass at the same time."""
        shard, share, model = self.shard, self.hardware.constants, self.shard.model
        if shard.attention_dp_size == 1 or self._experts is None:
            return []
        devices, links = shard.tp_size, self.hardware.links(shard.tp_size)
        receivers = self._experts.parts_of_token() * devices / shard.ep_size * (devices - 1) / devices
        copies = tokens * receivers / shard.attention_tp_size
        elsewhere = (devices - min(links.per_node, devices)) / (devices - 1)
        latency, found = share.all_to_all_s + (links.between_s if elsewhere else 0.0), []
        dispatched = shard.compute_bytes if shard.dtype in ("float32", "bf16", "fp16") else DISPATCH_BYTES
        for name, value_bytes in zip(ALL_TO_ALL, (dispatched, shard.compute_bytes), strict=True):
            moved = copies * model.hidden_size * value_bytes
            near = (1 - elsewhere) * moved / (share.all_to_all * links.within)
            far = elsewhere * moved / (NETWORK_SHARE * links.between)
            flow, count = max(near, far), self._counts[Mlp.EXPERTS]
            limit = "network" if flow > latency else "latency"
            found.append(OperationCost(name, 0, count * moved, count * (latency + flow) if tokens else 0.0, limit))
        return found

    # Attention, which depends on the positions of the tokens in their sequences.

    def _context_attention(self, work: StepWork) -> OperationCost:
        flops, moved = work.attention_pairs * self._flops_per_pair, work.context_kv_tokens * self._kv_bytes_per_token
        by_compute = work.attention_pairs * self._ns_per_pair > work.context_kv_tokens * self._ns_per_context_kv_token
        seconds = self._context_attention_ns(work) / NANOSECONDS
        return OperationCost("context attention", flops, moved, seconds, "compute" if by_compute else "memory")

    def _context_attention_ns(self, work: StepWork) -> float:
        time_ns = max(work.attention_pairs * self._ns_per_pair, work.context_kv_tokens * self._ns_per_context_kv_token)
        if self._ns_per_cached_token:  # those of the chunks themselves are among the products
            time_ns += (work.context_kv_tokens - work.context_tokens) * self._ns_per_cached_token
        return time_ns

    def _generation_attention(self, work: StepWork) -> OperationCost:
        keys = work.generation_kv_tokens
        seconds = keys * self._ns_per_kv_token / NANOSECONDS
        moved, flops = keys * self._kv_bytes_per_token, keys * self._flops_per_kv_token
        share = self.hardware.constants
        by_compute = self.shard.model.latent is not None and (
            flops / (share.latent_attention * self.hardware.peak_flops[self.shard.attention_dtype])
            > moved / (share.generation_attention * self.hardware.memory_bandwidth)
        )
        return OperationCost("generation attention", flops, moved, seconds, "compute" if by_compute else "memory")

    def _states(self, work: StepWork) -> OperationCost:
        """The states of recurrent layers: read and written for each request, and the arithmetic of context tokens."""
        moved = (work.context_requests + work.generation_tokens) * self._state_bytes
        flops = work.context_tokens * self._state_flops
        compute, memory = flops / self._output_flops_per_s, moved / self._bytes_per_s
        limit = "compute" if compute > memory else "memory"
        return OperationCost("recurrent states", flops, moved, math.hypot(compute, memory), limit)

    def _states_ns(self, work: StepWork) -> float:
        return self._states(work).seconds * NANOSECONDS


def _together(operations: list[OperationCost]) -> OperationCost:
    """Operations of one name, by the limit of the longest."""
    longest = max(operations, key=lambda one: one.seconds)
    return OperationCost(
        longest.name,
        sum([one.flops for one in operations], 0.0),
        sum([one.bytes for one in operations], 0.0),
        sum([one.seconds for one in operations], 0.0),
        longest.limit,
    )
