"""Random workloads through SGLang's own scheduler and through ours, compared in every batch.

Runs where SGLang 0.5.23 can be imported without a GPU, beside this project's dependencies; docs/engines.md has the
commands. `python -m benchmarks.sglang_oracle [--count 200] [--seed 0] [--workloads mixed|chunks|retractions|host]
[--write FILE]` prints one JSON object with the numbers of workloads, batches and retractions, and the first difference
of each workload that has one; exit status 1 if any has. --write keeps the workloads, with SGLang's answers, in a file
that `python -m tests.conformance FILE` replays without SGLang. With `--operations N`, `--host-operations N` or
`--passes N`, random operations on SGLang's radix cache, or random passes of its admission, run beside ours instead.

SGLang's own code are: the loop's decision (`get_next_batch_to_run`), admission, queue orders, retraction, pre-emption,
batches, radix cache, allocators, and the processing of results. Replaced are the model, its tokens, and what reports or
communicates.
"""

import argparse
import gzip
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from array import array
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conformance.outcome import Mismatch
from tests.conformance.sglang import END_TOKEN, MAX_LEN, MAX_ROUNDS, replay_decisions, replay_run, token_of
from tests.conformance.sglang_workloads import WORKLOADS

# What SGLang imports and does not need for a schedule.
GPU_PACKAGES = (
    "IPython",
    "deep_ep",
    "flash_attn",
    "flashinfer",
    "gguf",
    "pynvml",
    "sgl_kernel",
    "torch_memory_saver",
    "torchvision",
)


class _NothingToo(type):
    """Every attribute of the class is nothing too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_NothingToo):
    """Stands for a part of SGLang that decides nothing: false, empty, and every attribute and result is nothing too."""

    def __init__(self, *_arguments: Any, **_more: Any) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __call__(self, *_arguments: Any, **_more: Any) -> "Nothing":
        return self

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Stub(types.ModuleType):
    """A module of which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stub = name.partition(".")[0] in GPU_PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Stub(spec.name)
        module.__path__ = []
        setattr(module, "__version__", "99.0")  # noqa: B010
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


warnings.filterwarnings("ignore")
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.meta_path.insert(0, _Stubs())

import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy  # noqa: E402
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": MAX_LEN,
    "torch_dtype": "float32",
}
VOCABULARY = 4096


# SGLang's answers.


class OrderedAdder(PrefillAdder):  # type: ignore[misc]
    """SGLang keeps the running requests that are pre-empted at once in a set, so that their order in the queue is
    arbitrary; here it is that in which they ran."""

    def preempt_to_schedule(self, req: Req) -> bool:
        before, running = set(self.preempt_list), list(self.running_batch.reqs)
        is_done = bool(super().preempt_to_schedule(req))
        paused = set(self.preempt_list) - before
        del self.preempt_list[len(before) :]
        self.preempt_list += [one for one in running if one in paused]
        return is_done


class Original(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler with the state that its decisions read, and none of its processes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        page, overlaps = settings["page_size"], not settings["disable_overlap_schedule"]
        for name in ("schedule_policy", "schedule_conservativeness", "retraction_policy", "prefill_max_requests"):
            runtime_context.get_schedule()._set(name, settings[name])
        runtime_context.get_memory()._set("radix_eviction_policy", settings["radix_eviction_policy"])
        tokens = settings["num_pages"] * page
        self.req_to_token_pool = ReqToTokenPool(settings["max_running_requests"], MAX_LEN, "cpu", False)
        if page == 1:
            allocator = TokenToKVPoolAllocator(tokens, torch.float32, "cpu", Nothing(), need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.float32, "cpu", Nothing(), need_sort=False)
        self.token_to_kv_pool_allocator = allocator
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable=settings["disable_radix_cache"],
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                page_size=page,
                eviction_policy=settings["radix_eviction_policy"],
                tree_components=(ComponentType.FULL,),
                tree_core_backend="python",
            )
        )
        self.enable_hierarchical_cache = "num_host_pages" in settings
        if self.enable_hierarchical_cache:
            from benchmarks.sglang_host import Slots, attach_host

            attach_host(
                self.tree_cache, allocator, Slots(settings["num_host_pages"], page), settings["hicache_write_policy"]
            )
        self.page_size, self.device, self.is_generation = page, "cpu", True
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.max_prefill_tokens = settings["max_prefill_tokens"]
        self.chunked_prefill_size = settings["chunked_prefill_size"]
        self.is_mixed_chunk = settings["enable_mixed_chunk"] and self.chunked_prefill_size is not None
        self.enable_priority_scheduling = settings["enable_priority_scheduling"]
        self.enable_priority_preemption = (
            self.enable_priority_scheduling and not settings["disable_priority_preemption"]
        )
        self.priority_scheduling_preemption_threshold = settings["priority_scheduling_preemption_threshold"]
        self.schedule_low_priority_values_first = False
        self.max_running_requests, self.max_prefill_bs = settings["max_running_requests"], 0
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        self.policy = SchedulePolicy(
            settings["schedule_policy"],
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            False,
        )
        self.enable_overlap = self.enable_skip_finishing_decode = overlaps
        self.result_queue: deque[tuple[ScheduleBatch, Any]] = deque()
        self.disaggregation_mode, self.spec_algorithm = DisaggregationMode.NULL, SpeculativeAlgorithm.NONE
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY, is_encoder_decoder=False, self_opened_think_start_ids=None, think_end_ids=None
        )
        for name in (
            "dllm_config",
            "dynamic_chunk_sizer",
            "min_free_slots_delayer",
            "prefill_delayer",
            "truncation_align_size",
            "max_queued_requests",
            "lora_drainer",
            "decode_offload_manager",
            "hisparse_coordinator",
            "draft_worker",
        ):
            setattr(self, name, None)
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.processed_tokens_counter = self.forward_ct = 0
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch)
        self.beam_coordinator = SimpleNamespace(
            pending_member_rows=lambda batch: 0, commit_decode=lambda batch: set(), retire_group=lambda req: None
        )
        self.metrics_reporter = SimpleNamespace(
            num_retracted_reqs=0, enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0
        )
        for name in ("report_prefill_stats", "report_decode_stats", "update_spec_metrics"):
            setattr(self.metrics_reporter, name, Nothing())
        runner = SimpleNamespace(attn_backend=Nothing, prefill_aware_swa=False)
        self.tp_worker = self.model_worker = SimpleNamespace(model_runner=runner)
        self.aborted: list[int] = []
        self.send_abort_output = lambda _error, req: self.aborted.append(int(req.rid))
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=self.disaggregation_mode,
            enable_overlap=overlaps,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=self.tp_worker,
            logprob_result_processor=None,
            output_streamer=Nothing(),
            beam_coordinator=self.beam_coordinator,
            abort_request=None,
        )

    def __getattr__(self, name: str) -> Any:
        """What is not set here decides nothing in these workloads."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def process_pending_chunked_abort(self) -> None:
        return None

    def get_num_allocatable_reqs(self, running_bs: int, *_more: Any, num_held_rows: int = 0, **_others: Any) -> int:
        """As in SGLang, without pipeline stages and beams."""
        rows = max(self.req_to_token_pool.available_size() + num_held_rows, 0)
        return int(min(self.max_running_requests - running_bs, rows))

    def get_prefill_adder_class(self) -> type[OrderedAdder]:
        return OrderedAdder

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        """As in SGLang, without the prefill delayer."""
        batch, running_batch = self._get_new_batch_prefill_raw(None, running_batch)
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)


def answers(case: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """SGLang's batches, and how many requests it retracted. The loop is that of `event_loop_normal` and
    `event_loop_overlap`."""
    scheduler, settings = Original(case["settings"]), case["settings"]
    given = {one["id"]: one for one in case["requests"]}
    to_come = deque(sorted(case["requests"], key=lambda one: (one["round"], one["id"])))
    alive: dict[int, Req] = {}
    batches: list[dict[str, Any]] = []
    turn = num_retracted = 0
    while (alive or to_come) and turn < MAX_ROUNDS:
        while to_come and to_come[0]["round"] <= turn:
            one = to_come.popleft()
            if not alive:
                scheduler.new_token_ratio_tracker.reset()  # `on_idle`
            alive[one["id"]] = request = make_request(one, settings)
            scheduler._add_request_to_queue(request)
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            num_retracted += scheduler.metrics_reporter.num_retracted_reqs
            scheduler.metrics_reporter.num_retracted_reqs = 0
            batches.append(launch(scheduler, batch, given))
        if scheduler.result_queue and (not scheduler.enable_overlap or scheduler.last_batch):
            ended, result = scheduler.result_queue.popleft()
            requests = list(ended.reqs)
            if ended.forward_mode.is_decode():
                scheduler.batch_result_processor.process_batch_result_decode(ended, result)
            else:
                scheduler.batch_result_processor.process_batch_result_prefill(ended, result)
            for request in requests:
                if request.finished():
                    alive.pop(int(request.rid), None)
        for number in scheduler.aborted:
            alive.pop(number, None)
        scheduler.last_batch = batch
        turn += 1
    return batches, num_retracted


def make_request(given: dict[str, Any], settings: dict[str, Any]) -> Req:
    params = SamplingParams(max_new_tokens=given["max_new_tokens"], ignore_eos=settings["ignore_eos"])
    params.normalize(None)
    params.stop_token_ids = {END_TOKEN}
    return Req(
        rid=f"{given['id']:06}",  # hrrn compares ids as texts
        origin_input_text="",
        origin_input_ids=array("q", given["prompt"]),
        sampling_params=params,
        eos_token_ids=set(),
        vocab_size=VOCABULARY,
        priority=given["priority"] if settings["enable_priority_scheduling"] else None,
    )


def launch(scheduler: Original, batch: ScheduleBatch, given: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Put the result of a batch into the queue; returns what was decided, as the cases have it."""
    num_decoding = len(batch.reqs) if batch.forward_mode.is_decode() else len(batch.decoding_reqs or ())
    num_prefill = len(batch.reqs) - num_decoding
    prefill, decode = batch.reqs[:num_prefill], batch.reqs[num_prefill:]
    ends = [req.extend_end for req in prefill] + [req.kv.kv_committed_len for req in decode]
    scheduler.processed_tokens_counter += sum(req.extend_len for req in prefill)
    tokens = [
        token_of(given[int(req.rid)], end - len(req.origin_input_ids))
        for req, end in zip(batch.reqs, ends, strict=True)
    ]
    result = SimpleNamespace(
        next_token_ids=torch.tensor(tokens),
        get_num_generated_tokens=lambda size: size,
        can_run_cuda_graph=False,
        grammar_advanced=False,
        num_correct_drafts=0,
    )
    for name in (
        "copy_done",
        "auxiliary_host_output",
        "routed_experts_output",
        "indexer_topk_output",
        "logits_output",
        "extend_input_len_per_req",
        "extend_logprob_start_len_per_req",
        "num_correct_drafts_per_req_cpu",
        "next_token_logprobs",
    ):
        setattr(result, name, None)
    scheduler.result_queue.append((batch.copy() if scheduler.enable_overlap else batch, result))
    return {
        "prefill": [[int(req.rid), req.prefix_len, req.extend_len] for req in prefill],
        "decode": [int(req.rid) for req in decode],
        "queue": [int(req.rid) for req in scheduler.waiting_queue],
        "free": scheduler.token_to_kv_pool_allocator.available_size(),
        "evictable": scheduler.tree_cache.evictable_size(),
        "new_token_ratio": scheduler.new_token_ratio_tracker.current,
    }


def publish_settings() -> None:
    """The process-wide configuration that SGLang's classes read."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-oracle-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    arguments = ServerArgs(model_path=str(folder), skip_tokenizer_init=True, device="cpu", disable_cuda_graph=True)
    runtime_context.publish(arguments, role="scheduler")


def compare_parts(
    num_operations: int, num_host_operations: int, num_storage: int, num_passes: int, seed: int, file: Path | None
) -> int:
    """Radix cache, with and without host memory and storage, and admission alone; prints one JSON object, and returns
    the exit status."""
    from benchmarks.sglang_host import draw_host_operations
    from benchmarks.sglang_parts import draw_operations, draw_pass
    from benchmarks.sglang_storage import draw_storage_operations

    differences, cases = dict[str, str](), list[dict[str, Any]]()
    drawn = {"operations": 0, "host_operations": 0, "storage_operations": 0, "passes": 0, "decisions": 0}
    asked = {"operations": num_operations, "host_operations": num_host_operations, "passes": num_passes}
    asked["storage_operations"] = num_storage
    while missing := [name for name, number in asked.items() if drawn[name] < number]:
        count = min(asked[missing[0]] - drawn[missing[0]], 250)
        if missing[0] == "operations":
            case = draw_operations(seed, count)
            drawn["operations"] += len(case["operations"])
        elif missing[0] == "host_operations":
            case = draw_host_operations(seed, count)
            drawn["host_operations"] += len(case["operations"])
        elif missing[0] == "storage_operations":
            case = draw_storage_operations(seed, count)
            drawn["storage_operations"] += len(case["operations"])
        else:
            case = draw_pass(seed)
            drawn["passes"] += 1
            drawn["decisions"] += len(case["waiting"]) + (case["continuing"] is not None)
        try:
            replay_decisions(case)
            cases.append({"name": f"{case['kind']}-{seed}", **case})
        except Mismatch as mismatch:
            differences[f"{case['kind']}-{seed}"] = str(mismatch)
        seed += 1
    if file is not None:
        content = json.dumps({"schema": "sglang-golden/parts/1", "engine": "sglang 0.5.23", "cases": cases})
        file.write_bytes(gzip.compress(content.encode(), mtime=0))
    print(json.dumps({**drawn, "differences": differences}, indent=2))
    return 1 if differences else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="workloads (default 200)")
    parser.add_argument("--workloads", choices=tuple(WORKLOADS), default="mixed", help="of which kind (default mixed)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default 0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the cases without a difference")
    parser.add_argument("--operations", type=int, metavar="N", help="operations on the radix cache instead")
    parser.add_argument("--host-operations", type=int, metavar="N", help="those with host memory instead")
    parser.add_argument("--storage-operations", type=int, metavar="N", help="those with storage behind it instead")
    parser.add_argument("--passes", type=int, metavar="N", help="admission passes instead")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    publish_settings()
    parts = options.operations, options.host_operations, options.storage_operations, options.passes
    if any(parts):
        operations, host_operations, storage_operations, passes = (count or 0 for count in parts)
        return compare_parts(
            operations, host_operations, storage_operations, passes, seed=options.seed, file=options.write
        )
    cases, differences = list[dict[str, Any]](), dict[str, str]()
    totals = dict.fromkeys(("batches", "requests", "retractions"), 0)
    for seed in range(options.seed, options.seed + options.count):
        case = WORKLOADS[options.workloads](seed)
        case["batches"], num_retracted = answers(case)
        totals["batches"] += len(case["batches"])
        totals["requests"] += len(case["requests"])
        totals["retractions"] += num_retracted
        cases.append(case)
        try:
            replay_run(case)
        except Mismatch as mismatch:
            differences[case["name"]] = str(mismatch)
    print(json.dumps({"workloads": options.count, **totals, "differences": differences}, indent=2))
    if options.write is not None:
        content = json.dumps({"schema": "sglang-golden/runs/1", "engine": "sglang 0.5.23", "cases": cases})
        options.write.write_bytes(gzip.compress(content.encode(), mtime=0))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
