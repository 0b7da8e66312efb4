"""The types of `summary.json`, from which its JSON schema is made. A field that may be UNSET need not be there."""

from typing import Any

from msgspec import Struct, UnsetType


class Distribution(Struct):
    """Statistics of a figure over requests, or over gaps between tokens; None if there are none."""

    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_9: float | None
    max: float | None


class RequestCounts(Struct):
    """Requests of the trace, those with all their tokens, and those that were refused or failed."""

    total: int
    completed: int
    failed: int


class RepeatCounts(Struct):
    """Repeats of a run, and those that ended."""

    total: int
    completed: int


class WindowBlocks(Struct):
    """Blocks of one of several attention windows."""

    max: int
    peak_used: int


class KvBlocks(Struct):
    """Blocks of the paged KV cache; None for a contiguous one.

    per_window_size: blocks of each of several attention windows, by its tokens; `max` is their sum, and `peak_used` the
        most that were in use in all of them at a time.
    """

    max: int | None
    peak_used: int | None
    tokens_per_block: int | None
    per_window_size: dict[str, WindowBlocks] | UnsetType


class KvTokens(Struct):
    """Token positions of the KV cache: in all, the largest number that requests held, and with a token in them."""

    max: int
    peak_held: int
    peak_filled: int


class Objective(Struct):
    """A service level objective.

    share: share of the completed requests that met it, if it is one of each request.
    """

    target: float
    value: float | None
    met: bool
    share: float | UnsetType


class Arrivals(Struct):
    """The rate at which requests were to arrive, the one at which they were submitted, and how late that was."""

    requested_rate_per_s: float | None
    achieved_rate_per_s: float | None
    lateness_s: Distribution


class Window(Struct):
    """The steady state, on the run's clock."""

    start_s: float
    end_s: float


class Burst(Struct):
    """A stretch of arrivals above the mean rate in which slow requests arrived.

    rate_over_mean: its rate over that.
    """

    start_s: float
    duration_s: float
    requests: int
    slow_requests: int
    rate_per_s: float
    rate_over_mean: float


class RequestFigures(Struct):
    """The figures of requests: of all, of a class, or of a priority. Throughput is None where a log does not say it."""

    requests: RequestCounts
    request_throughput_per_s: float | None
    output_throughput_tokens_per_s: float | None
    total_throughput_tokens_per_s: float | None
    queue_time_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    itl_s: Distribution
    prefix_hit_rate: float | None
    prompt_tokens: int
    output_tokens: int
    per_user_output_speed_tokens_per_s: Distribution | UnsetType
    goodput_requests_per_s: float | UnsetType | None
    goodput_share: float | UnsetType | None
    slo: dict[str, Objective] | UnsetType


class GroupFigures(RequestFigures):
    """The figures of a class or of a priority."""

    output_tokens_per_request_s: float


class ExpectedError(Struct):
    """How far figures of a simulated run may be from a real server's: [low, high], relative, of each.

    reason: why nothing is known, if `compared` is false.
    coverage: share of servers that are expected to be within.
    of: the engine, GPU and load whose `rows` measurements of `curves` deployments the range is of.
    too_few: those of the run, if there are too few measurements of them.
    """

    compared: bool
    reason: str | UnsetType
    rows: int | UnsetType
    curves: int | UnsetType
    coverage: float | UnsetType
    load: str | UnsetType
    of: str | UnsetType
    too_few: str | UnsetType
    ttft_s: list[float] | UnsetType
    itl_s: list[float] | UnsetType
    output_throughput_tokens_per_s: list[float] | UnsetType


class HostCache(Struct):
    """What a run did with SGLang's hierarchical cache; see `ifbbench.schedulers.sglang.host_pages`."""

    pages: int
    used_pages: int
    stored_tokens: int
    loaded_tokens: int
    evicted_tokens: int


class KvTier(Struct):
    """What a run did with a store beneath the device memory; see `ifbbench.kv.tiers.figures_of`."""

    tokens: int
    used_tokens: int
    stored_tokens: int
    loaded_tokens: int
    evicted_tokens: int
    max_waiting_writes: int


class Lora(Struct):
    """What a run did with LoRA adapters; see `ifbbench.kv.adapters.AdapterCounters`."""

    adapters: int
    device_pages: int
    host_pages: int
    page_bytes: int
    hit_rate: float | None
    uses: int
    misses: int
    evictions: int
    bytes: int
    loads: int
    host_evictions: int
    peak_device_pages: int


class KvRetention(Struct):
    """Blocks that kept a retention priority above the default one; see `ifbbench.kv.interface.KvCache`."""

    retained_blocks: int
    expired_blocks: int
    lost_blocks: int
    evicted_blocks: int


class SpeculativeDecoding(Struct):
    """Draft tokens that were verified, and those that became output.

    acceptance_length: tokens of a step with drafts.
    draft_s: device time of the draft model.
    """

    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    acceptance_length: float
    draft_s: float


class Energy(Struct):
    """What the GPUs of a simulated run took: in all, each on average, and for each token and completed request. Hosts,
    networks and cooling are not in it."""

    joules: float
    gpus: int
    power_w_per_gpu: float
    joules_per_output_token: float | None
    joules_per_token: float | None
    joules_per_request: float | None


class BackendFigures(Struct):
    """What a router saw of one of its servers.

    sent: number of attempts.
    failed: number of attempts without an answer.
    completed: number of requests that it answered.
    is_up: whether it took requests at the end.
    """

    replica: int
    url: str
    sent: int
    failed: int
    completed: int
    is_up: bool


class EndpointFigures(Struct):
    """What a client saw of a server that is not ours, and what it took itself.

    errors, retries, warnings: counts by kind.
    chunk_tokens: number of answers, by how the tokens of their chunks are known.
    send_delay_s: time from arrival to sending.
    router, backends: figures of a router in front of several servers.
    """

    errors: dict[str, int]
    retries: dict[str, int]
    warnings: dict[str, int] | UnsetType
    shorter_than_asked: int
    chunk_tokens: dict[str, int]
    tokens_per_chunk: Distribution
    chunk_gap_s: Distribution
    send_delay_s: Distribution
    connections: int | UnsetType
    resent: int | UnsetType
    client_cpu_s: float | UnsetType
    client_cpu_share: float | UnsetType
    client_cpu_s_per_request: float | UnsetType | None
    metrics_samples: int | UnsetType
    metrics_errors: int | UnsetType
    router: str | UnsetType
    backends: list[BackendFigures] | UnsetType


class ReplayDiffers(Struct):
    """Why a replay of a server's recording may decide otherwise: requests that their clients stopped before the first
    token, and how often, and how much in all, the host moved the simulated time on because it was late."""

    stopped_before_output: int
    host_delays: int
    host_delay_s: float


class DeliveryLag(Struct):
    """How much later than the times recorded a server handed responses to the connections of its clients."""

    mean: float
    max: float


class ReplicaFigures(Struct):
    """The figures of a replica of a fleet.

    up_s: time in which its GPUs were taken.
    started_s, ready_s, ended_s: where replicas start or end, when its GPUs were taken, when it took requests (None:
        never), and when it ended.
    ended_by: fail or drain; None if it was there to the end.
    settings: settings that not all replicas have in common, where replicas differ.
    """

    replica: int
    gpus: int
    up_s: float
    started_s: float | UnsetType
    ready_s: float | UnsetType | None
    ended_s: float | UnsetType
    ended_by: str | UnsetType | None
    settings: dict[str, Any] | UnsetType
    requests: RequestCounts
    prompt_tokens: int
    output_tokens: int
    output_throughput_tokens_per_s: float
    prefix_hit_rate: float | None
    queue_time_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    iterations: int
    pauses: int
    kv_blocks: KvBlocks
    side: str | UnsetType


class TransferFigures(Struct):
    """Keys and values that prefill replicas sent to decode replicas.

    local_requests: number of requests whose prompts the decode replica computed.
    transfer_s: how long each took.
    decode_wait_s: how long each waited for blocks there.
    """

    count: int
    tokens: int
    bytes: float
    local_requests: int
    transfer_s: Distribution
    decode_wait_s: Distribution


class FleetEvent(Struct):
    """What happened to a replica of a fleet: start, ready, drain or fail. Of a failure: requests that were sent again,
    that were lost, tokens that had been computed for them, and why, unless it was asked for. Of the autoscaler: how
    many replicas it wanted, and what it had measured."""

    at_s: float
    event: str
    replica: int
    retried: int | UnsetType
    lost: int | UnsetType
    lost_tokens: int | UnsetType
    reason: str | UnsetType
    wanted: int | UnsetType
    measured: str | UnsetType


class FleetFigures(Struct):
    """The replicas of a fleet.

    gpu_hours: hours of all GPUs while their replicas were up.
    cost: price of these hours in USD, where the hardware profiles have prices.
    imbalance: what the replica with most of it has, over the mean: requests, tokens of their prompts and outputs.
    """

    router: str
    gpus: int
    gpu_hours: float
    cost: float | UnsetType
    cost_per_million_output_tokens: float | UnsetType | None
    imbalance: dict[str, float]
    replicas: list[ReplicaFigures]
    events: list[FleetEvent] | UnsetType
    transfers: TransferFigures | UnsetType


class Summary(RequestFigures):
    """Every figure of a run. None is what is unknown of a run against an endpoint."""

    duration_s: float
    iterations: int | None
    pauses: int | None
    recomputed_tokens: int | None
    recomputed_share: float | None
    empty_generation_slots: int | None
    padding_waste: float | None
    kv_blocks: KvBlocks
    kv_tokens: KvTokens | None
    peak_scheduled_requests: int | None
    bound_by: dict[str, float]
    schedule_digest: str | None
    endpoint: EndpointFigures | UnsetType
    delivery_lag_s: DeliveryLag | UnsetType
    replay_differs: ReplayDiffers | UnsetType
    partial: bool
    bound_by_time: dict[str, float] | UnsetType
    waiting_by_limit: dict[str, float] | UnsetType
    arrivals: Arrivals | UnsetType
    by_class: dict[str, GroupFigures] | UnsetType
    by_priority: dict[str, GroupFigures] | UnsetType
    fairness_index: float | UnsetType | None
    overloaded: bool | UnsetType
    queue_growth_requests_per_s: float | UnsetType
    bursts: list[Burst] | UnsetType
    slow_requests: int | UnsetType
    slow_ttft_s: float | UnsetType
    steady_state: Window | UnsetType | None
    expected_error: ExpectedError | UnsetType
    lora: Lora | UnsetType
    host_cache: HostCache | UnsetType
    kv_retention: KvRetention | UnsetType
    kv_tiers: dict[str, KvTier] | UnsetType
    speculative_decoding: SpeculativeDecoding | UnsetType
    fleet: FleetFigures | UnsetType
    energy: Energy | UnsetType
