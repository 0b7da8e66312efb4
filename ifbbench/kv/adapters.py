"""The page cache of LoRA adapters: which of them are in device and host memory, and what a batch must load.

TensorRT-LLM's `PeftCacheManager`: an adapter takes whole pages of the device cache, and of the host cache, from which
it is copied to the device. The adapters that a batch needs are never evicted for it; of the others, the least recently
used one is.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from ifbbench.engine.arrays import Int64Array
from ifbbench.engine.batch import NO_ADAPTER, AdapterLoad
from ifbbench.engine.request import Request
from ifbbench.errors import InputError


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Adapter pages on the device.

    pages: pages of the tasks that take another number than `pages_per_task`.
    """

    pages_per_task: int = 0
    max_device_pages: int = 0
    pages: Mapping[int, int] = field(default_factory=dict)

    def pages_of(self, task_id: int) -> int:
        return self.pages.get(task_id, self.pages_per_task)

    @property
    def may_bind(self) -> bool:
        """Whether any adapter takes pages."""
        return self.pages_per_task > 0 or len(self.pages) > 0


NO_LORA = LoraLimits()


class LoraPages:
    """Adapter pages claimed in one iteration: each distinct task id counts once."""

    def __init__(self, limits: LoraLimits) -> None:
        self._limits = limits
        self._claimed: set[int] = set()
        self._free = limits.max_device_pages

    def fits(self, request: Request) -> bool:
        """Whether the adapter of `request` is already claimed or still fits."""
        if request.lora_task_id is None or request.lora_task_id in self._claimed:
            return True
        return self._limits.pages_of(request.lora_task_id) <= self._free

    def claim(self, request: Request) -> None:
        if request.lora_task_id is not None and request.lora_task_id not in self._claimed:
            self._claimed.add(request.lora_task_id)
            self._free -= self._limits.pages_of(request.lora_task_id)


class AdapterSize(NamedTuple):
    """The memory that one adapter takes.

    pages: pages of a cache.
    values: values of all its matrices, on one device.
    is_stored: whether it can be read again, which is not so if a request brought it.
    """

    pages: int
    values: int
    is_stored: bool = True


class AdapterSource(Protocol):
    """Where adapters come from, and their copies in host memory."""

    def tasks(self) -> Iterable[int]:
        """Task ids of the stored adapters."""
        ...

    def size(self, task_id: int) -> AdapterSize | None:
        """The size of an adapter, None if there is no such adapter."""
        ...

    def add(self, task_id: int, weights: Any, config: Any) -> None:
        """Keep an adapter that a request brought, in the layout of TensorRT-LLM. InputError if it does not fit the
        model."""
        ...

    def keep(self, task_id: int) -> None:
        """Read a stored adapter into host memory."""
        ...

    def drop(self, task_id: int) -> None:
        """Free its host memory; one that is not stored is then unknown."""
        ...


def distinct_tasks(tasks: Int64Array, others: Iterable[int] = ()) -> list[int]:
    """Each task id of both once, in ascending order, without NO_ADAPTER."""
    return sorted({*tasks.tolist(), *others} - {NO_ADAPTER})


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The adapters and the sizes of their caches, in pages of `page_bytes` bytes.

    value_bytes: bytes of one value.
    """

    source: AdapterSource
    device_pages: int
    host_pages: int
    page_bytes: int
    value_bytes: int


@dataclass(slots=True)
class AdapterCounters:
    """What a run did with adapters.

    uses: adapters that iterations needed, each counted once an iteration.
    misses: those that were not on the device, which costs a copy.
    evictions: adapters evicted from the device.
    bytes: bytes copied to the device.
    loads: adapters read into host memory since the start of the run, from the directory or a request.
    host_evictions: adapters evicted from host memory.
    peak_device_pages: maximum number of device pages held at a time.
    """

    uses: int = 0
    misses: int = 0
    evictions: int = 0
    bytes: int = 0
    loads: int = 0
    host_evictions: int = 0
    peak_device_pages: int = 0


class OutOfAdapterPages(Exception):
    """The adapters of one batch do not fit on the device together, which the capacity scheduler prevents."""


class AdapterCache:
    """The pages of adapters on the device and in host memory. Stored adapters begin in host memory, as far as they fit.

    limits: for the capacity scheduler. An adapter that a request brought stays in host memory while a request uses it;
    one that is evicted there is unknown afterwards.
    """

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self.counters = AdapterCounters()
        self._pages: dict[int, int] = {}
        self.limits = LoraLimits(0, config.device_pages, self._pages)
        # Least recently used first. Task id to its pages, and to their number.
        self._device: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._host: OrderedDict[int, int] = OrderedDict()
        self._free_pages = list(range(config.device_pages - 1, -1, -1))
        self._free_host_pages = config.host_pages
        self._num_requests: Counter[int] = Counter()
        for task_id in config.source.tasks():
            size = config.source.size(task_id)
            assert size is not None
            if size.pages <= self._free_host_pages:
                self._put_in_host(task_id, size.pages)
                config.source.keep(task_id)

    def refusal(self, request: Request) -> str | None:
        """Why the adapter of `request` cannot be used, or None. Takes an adapter that the request brought."""
        task_id, source, options = request.lora_task_id, self.config.source, request.options
        if task_id is None:
            return None
        size = source.size(task_id)
        if size is None and options.lora_weights is not None:
            try:
                source.add(task_id, options.lora_weights, options.lora_config)
            except InputError as error:
                return str(error)
            size = source.size(task_id)
            assert size is not None
            if not self._make_room_in_host(size.pages):
                source.drop(task_id)
                return (
                    f"LoRA task {task_id} needs {size.pages} pages of host memory, and no adapter can be evicted "
                    f"from its {self.config.host_pages} (lora_host_cache_bytes)"
                )
            self._put_in_host(task_id, size.pages)
            self.counters.loads += 1
        if size is None:
            return (
                f"LoRA task {task_id} is unknown, or was evicted: expected lora_weights and lora_config with the "
                "request, or an adapter of --lora_dir or --num_loras"
            )
        if size.pages > self.config.device_pages:
            return (
                f"LoRA task {task_id} needs {size.pages} pages of device memory; there are "
                f"{self.config.device_pages} (lora_device_mem_fraction)"
            )
        self._pages[task_id] = size.pages
        return None

    def hold(self, request: Request) -> None:
        """`request` waits or is active: an adapter that cannot be read again stays in host memory."""
        if request.lora_task_id is not None:
            self._num_requests[request.lora_task_id] += 1

    def release(self, request: Request) -> None:
        """`request` has left."""
        if request.lora_task_id is not None:
            self._num_requests[request.lora_task_id] -= 1

    def use(self, tasks: Sequence[int], iterations: int = 1) -> tuple[AdapterLoad, ...]:
        """The next iterations use these adapters, each once in `tasks`. Returns what is to be loaded before the first.

        Raises OutOfAdapterPages if they do not fit together."""
        self.counters.uses += len(tasks) * iterations
        missing = [task_id for task_id in tasks if task_id not in self._device]
        for task_id in tasks:
            if task_id in self._device:
                self._device.move_to_end(task_id)
        loads = tuple([self._load(task_id, tasks) for task_id in missing])
        used = self.config.device_pages - len(self._free_pages)
        self.counters.peak_device_pages = max(self.counters.peak_device_pages, used)
        return loads

    def forget_device(self) -> None:
        """After an error of the executor, what is on the device is unknown: every adapter will be copied again."""
        while self._device:
            self._free_pages.extend(reversed(self._device.popitem()[1]))

    def check_consistency(self) -> None:
        """For tests: AssertionError if a page is lost or used twice."""
        pages = [*self._free_pages, *(page for pages in self._device.values() for page in pages)]
        assert sorted(pages) == list(range(self.config.device_pages))
        assert self._free_host_pages == self.config.host_pages - sum(self._host.values()) >= 0

    def figures(self) -> dict[str, Any]:
        """The entry `lora` of `summary.json`."""
        config, counters = self.config, self.counters
        return {
            "adapters": len(self._pages),
            "device_pages": config.device_pages,
            "host_pages": config.host_pages,
            "page_bytes": config.page_bytes,
            "hit_rate": 1 - counters.misses / counters.uses if counters.uses else None,
            **asdict(counters),
        }

    def _load(self, task_id: int, needed: Collection[int]) -> AdapterLoad:
        size, free = self.config.source.size(task_id), self._free_pages
        assert size is not None
        while len(free) < size.pages:
            victim = next((other for other in self._device if other not in needed), None)
            if victim is None:
                raise OutOfAdapterPages(f"LoRA task {task_id} needs {size.pages} pages, {len(free)} are free")
            free.extend(reversed(self._device.pop(victim)))
            self.counters.evictions += 1
        pages = tuple([free.pop() for _ in range(size.pages)])
        self._device[task_id] = pages
        self.counters.misses += 1
        self.counters.bytes += size.values * self.config.value_bytes
        if task_id in self._host:
            self._host.move_to_end(task_id)
            return AdapterLoad(task_id, pages)
        self.counters.loads += 1
        is_kept = self._make_room_in_host(size.pages)
        if is_kept:
            self._put_in_host(task_id, size.pages)
        return AdapterLoad(task_id, pages, from_host=False, is_kept=is_kept)

    def _put_in_host(self, task_id: int, pages: int) -> None:
        self._host[task_id] = pages
        self._free_host_pages -= pages

    def _make_room_in_host(self, pages: int) -> bool:
        """Evict until `pages` are free in host memory; False, with nothing done, if that is impossible."""
        evictable = [task_id for task_id in self._host if not self._num_requests[task_id] or self._is_stored(task_id)]
        if pages > self._free_host_pages + sum([self._host[task_id] for task_id in evictable]):
            return False
        # Adapters that no request uses are dropped first.
        for task_id in sorted(evictable, key=lambda task_id: self._num_requests[task_id] > 0):
            if pages <= self._free_host_pages:
                break
            self._free_host_pages += self._host.pop(task_id)
            self.counters.host_evictions += 1
            if not self._is_stored(task_id) and task_id in self._device:
                self._free_pages.extend(reversed(self._device.pop(task_id)))
            self.config.source.drop(task_id)
        return True

    def _is_stored(self, task_id: int) -> bool:
        size = self.config.source.size(task_id)
        return size is not None and size.is_stored
