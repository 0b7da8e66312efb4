"""DeepSeek-V3 and models of its shape: latent attention over a paged cache of latent vectors, and experts in parallel.

Attention is absorbed in both phases: queries are multiplied by the matrices that would expand latent vectors to keys,
and outputs by those that would expand them to values, so that all heads attend to the same vector, as with one KV head.
"""

import dataclasses
import math

import torch
from torch import Tensor

from ifbbench.models.config import ModelConfig, YarnRopeScaling
from ifbbench.models.layers import LatentAttention, Routing
from ifbbench.torch.model.deepseek_weights import DeepseekLayer, ExpertWeights
from ifbbench.torch.model.layer_weights import LayerWeights
from ifbbench.torch.model.linear import Product
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel, attend
from ifbbench.torch.model.lora import BatchAdapters
from ifbbench.torch.model.operations import Angles, Operations, RotaryEmbedding
from ifbbench.torch.model.weights import ModelWeights

# The epsilon of the norms of compressed queries and latent vectors, in every model.
LATENT_NORM_EPS = 1e-6
# Keeps the weights of experts finite where all scores are 0.
SMALLEST_SUM = 1e-20


class DeepseekModel(LlamaModel):
    """DeepSeek-V3 (arXiv:2412.19437), for inference only: `DeepseekV3ForCausalLM` of transformers."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations | None = None) -> None:
        assert config.latent is not None
        assert config.routing is not None
        super().__init__(config, weights, operations)
        self._latent: LatentAttention = config.latent
        self._routing: Routing = config.routing
        self._rotary = RotaryEmbedding(dataclasses.replace(config, head_dim=config.latent.rope), self.device)
        # Attention divides by the root of the size of a head in the cache.
        latent, scaling = config.latent, config.rope_scaling
        self._query_scale = math.sqrt(latent.cached / (latent.nope + latent.rope))
        if isinstance(scaling, YarnRopeScaling):
            self._query_scale *= scaling.softmax_factor

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, angles: Angles, inputs: ForwardInputs
    ) -> Tensor:
        assert isinstance(layer, DeepseekLayer)
        assert layer.latent_norm is not None
        assert layer.key_up is not None
        assert layer.value_up is not None
        latent, heads = self._latent, self.config.num_heads
        first = layer.query_key_value(self._norm(hidden, layer.attention_norm))
        queries, vectors, rotated_key = torch.split(
            first, [first.shape[1] - latent.cached, latent.kv_rank, latent.rope], dim=1
        )
        if layer.query_up is not None:
            assert layer.query_rank_norm is not None
            queries = layer.query_up(self.operations.norm(queries, layer.query_rank_norm, LATENT_NORM_EPS))
        queries = queries.view(-1, heads, latent.nope + latent.rope)
        to_rotate = torch.cat([queries[:, :, latent.nope :], rotated_key.unsqueeze(1)], dim=1)
        rotated = self.operations.rotate(to_rotate, angles)
        absorbed = torch.bmm(queries[:, :, : latent.nope].transpose(0, 1), layer.key_up).transpose(0, 1)
        absorbed = torch.cat([absorbed, rotated[:, :heads]], dim=2) * self._query_scale
        normed = self.operations.norm(vectors, layer.latent_norm, LATENT_NORM_EPS)
        keys = torch.cat([normed.unsqueeze(1), rotated[:, heads:]], dim=2)
        output = attend(index, absorbed, keys, keys, inputs.layers[index], self.operations)
        output = output.view(-1, heads, latent.cached)[:, :, : latent.kv_rank]
        return torch.bmm(output.transpose(0, 1), layer.value_up).transpose(0, 1).flatten(1)

    def _mlp(self, index: int, layer: LayerWeights, hidden: Tensor, adapters: BatchAdapters | None) -> Tensor:
        assert isinstance(layer, DeepseekLayer)
        if (routed := layer.routed) is None:
            return super()._mlp(index, layer, hidden, adapters)
        normed = self._norm(hidden, layer.mlp_norm)
        chosen, weights = self._route(routed, normed)
        output = torch.zeros_like(normed)
        if routed.shared is not None:
            output += self._computed(routed.shared, normed)
        for number, expert in enumerate(routed.experts, routed.first):
            rows, places = torch.nonzero(chosen == number, as_tuple=True)
            if len(rows):
                result = self._computed(expert, normed.index_select(0, rows))
                output.index_add_(0, rows, result * weights[rows, places].unsqueeze(1).to(result.dtype))
        return self._sum(output)

    def _computed(self, expert: tuple[Product, Product], rows: Tensor) -> Tensor:
        gate_up, down = expert
        return down(self.operations.swiglu(gate_up(rows)))

    def _route(self, routed: ExpertWeights, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and weights of the experts of each row, [rows, experts of a token]: those with the
        largest scores, in the groups whose two largest scores together are largest."""
        routing, count = self._routing, len(routed.bias)
        scores = torch.nn.functional.linear(rows.float(), routed.router).sigmoid()
        biased = (scores + routed.bias).view(-1, routing.groups, count // routing.groups)
        groups = biased.topk(2, dim=-1).values.sum(dim=-1).topk(routing.groups_per_token, dim=-1).indices
        is_open = torch.zeros(biased.shape[:2], dtype=torch.bool, device=rows.device).scatter_(1, groups, value=True)
        biased = biased.masked_fill(~is_open.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = biased.topk(self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if routing.normalises:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        return chosen, weights * routing.scale
