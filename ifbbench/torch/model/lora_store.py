"""The adapters of a model: an `AdapterSource` for the engine, with their pages in host memory where one computes."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ifbbench.kv.adapters import AdapterSize
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import PageLayout, Placement, lora_modules, split
from ifbbench.torch.model.lora_files import Adapter, TensorRtAdapter

if TYPE_CHECKING:  # simulated runs need the sizes only, without PyTorch
    import torch
    from torch import Tensor

# Copies an adapter into pages, [pages, values of a page] in host memory.
MakePages = Callable[["AdapterStore", Adapter, Placement], "Tensor"]


class AdapterStore:
    """Adapters by task id, divided as the model is: `rank` of `world` has its share of each matrix in its `layers`.

    make_pages: None for devices without a model. Adapters that requests bring may have ranks up to `max_rank`.
    """

    def __init__(
        self,
        config: ModelConfig,
        adapters: Mapping[int, Adapter],
        max_rank: int,
        make_pages: MakePages | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        layers: range | None = None,
    ) -> None:
        self.config = config
        self.rank, self.world = rank, world
        self.layers = range(config.num_layers) if layers is None else layers
        self.layout = PageLayout(lora_modules(config, world), len(self.layers), max_rank)
        self._max_rank = max_rank
        self._make_pages = make_pages
        self._stored = dict(adapters)
        self._placements = {task_id: self._place(adapter) for task_id, adapter in adapters.items()}
        self._pages: dict[int, Tensor] = {}

    def tasks(self) -> Iterable[int]:
        return self._stored

    def size(self, task_id: int) -> AdapterSize | None:
        placement = self._placements.get(task_id)
        if placement is None:
            return None
        return AdapterSize(len(placement.used), placement.values, task_id in self._stored)

    def placement(self, task_id: int) -> Placement:
        return self._placements[task_id]

    def add(self, task_id: int, weights: Any, config: Any) -> None:
        adapter = TensorRtAdapter(weights, config, self.config, self._max_rank)
        self._placements[task_id] = self._place(adapter)
        if self._make_pages is not None:
            self._pages[task_id] = self._make_pages(self, adapter, self._placements[task_id])

    def keep(self, task_id: int) -> None:
        if self._make_pages is not None:
            self.pages(task_id)

    def pages(self, task_id: int) -> "Tensor":
        """The adapter in host memory, [pages, values of a page]; a stored one is read now if it is not there."""
        assert self._make_pages is not None
        if task_id not in self._pages:
            self._pages[task_id] = self._make_pages(self, self._stored[task_id], self._placements[task_id])
        return self._pages[task_id]

    def drop(self, task_id: int) -> None:
        self._pages.pop(task_id, None)
        if task_id not in self._stored:
            del self._placements[task_id]

    def _place(self, adapter: Adapter) -> Placement:
        return self.layout.place(adapter.ranks[self.layers.start : self.layers.stop])


def pages_in_host_memory(dtype: "torch.dtype", pinned: bool) -> MakePages:
    """Pages of this data type, in pinned memory for a GPU."""
    import torch  # only where weights are computed with

    def make_pages(store: AdapterStore, adapter: Adapter, placement: Placement) -> "Tensor":
        layout = store.layout
        pages = torch.zeros((len(placement.used), layout.page_values), dtype=dtype, pin_memory=pinned)
        for layer, module, lora_a, lora_b in adapter.pairs():
            if layer not in store.layers:
                continue
            at = layer - store.layers.start
            first = int(placement.slot[at, module]) * layout.width
            page = pages[int(placement.page[at, module])]
            for matrix in split(store.config, module, lora_a, lora_b, store.rank, store.world):
                page[first : first + matrix.numel()] = matrix.reshape(-1)
                first += matrix.numel()
        return pages

    return make_pages
