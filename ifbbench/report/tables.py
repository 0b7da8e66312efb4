"""The report of a run as text: throughput, latencies, limits, objectives, classes, profile and failures."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import NOTHING, count, percent, significant, time_unit
from ifbbench.analysis.words import BINDING, SIZES, Words, setting_of, words_of
from ifbbench.engine.plan import Limit
from ifbbench.report import bar, plain_table, print_fitting
from ifbbench.report.profile import print_profile
from ifbbench.rundir.figures import figures
from ifbbench.rundir.metrics import fullest_window
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.run_directory import find_lines
from ifbbench.settings.fields import as_text, memory_size

LATENCIES = {"queue_time_s": "Queue time", "ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E"}
STATISTICS = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p99_9": "p99.9", "max": "max"}
# Shares of each limit: key in the summary, heading, and cells of the bar.
LIMIT_SHARES = {
    "bound_by_time": ("of the time", 16),
    "waiting_by_limit": ("of waiting", 16),
    "bound_by": ("of iterations", 0),
}
# The columns for each class or priority: heading, figure and statistic.
GROUP_COLUMNS = {
    "TTFT p50": ("ttft_s", "p50"),
    "TTFT p99": ("ttft_s", "p99"),
    "TPOT p50": ("tpot_s", "p50"),
    "TPOT p99": ("tpot_s", "p99"),
    "E2E p99": ("e2e_s", "p99"),
}
# Figures with a band of the expected error.
EXPECTED_ERRORS = {"ttft_s": "TTFT", "itl_s": "ITL", "output_throughput_tokens_per_s": "output throughput"}
# Words in the line of settings, and the runs that have them.
BATCHING_TYPES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "static batches (V1)": lambda config: config.get("type") == "v1",
    # Runs of earlier versions call it `inflight`.
    "a pass for each phase": lambda config: config.get("type") in ("inflight_unfused", "inflight"),
    "overlap": lambda config: bool(config.get("enable_trt_overlap")),
    "beams": lambda config: (config.get("max_beam_width") or 1) > 1,
    "streaming": lambda config: bool(config.get("streaming")),
}
# How a model is divided among GPUs, and the settings of it.
SIZES_OF_GPUS = {"TP": "tp_size", "PP": "pp_size", "EP": "ep_size", "attention DP": "attention_dp_size"}
TIER_NAMES = {"disk": "Disks", "remote": "Remote store"}
FAILURES_SHOWN = 5


def print_report(run: RunData, console: Console, known: dict[str, Any] | None = None) -> None:
    """Print `known`, by default the figures of `run`; a partial run's are marked as such."""
    known = known or figures(run)
    console.print()
    console.print(f"[bold]{escape(run.name)}[/bold]  {escape(settings_line(run))}", highlight=False)
    if run.partial:
        covers = "" if run.summary else " Latencies and throughput cover the requests that completed."
        console.print(f"[yellow]Partial: the run did not reach its end.{covers}[/yellow]")
    if imported := run.run.get("imported"):
        lost = "".join(f"\n- {sentence}" for sentence in imported["lost"])
        text = f"Imported from {imported['file']} ({imported['format']}). Not in it:{lost}"
        console.print(escape(text), style="yellow", highlight=False, soft_wrap=True)
    if run.recorded_every > 1:
        covers = "The figures are of all." if run.summary else "ITL and padding of this partial run are unknown."
        thinned = f"Thinned: one of {run.recorded_every} iterations has its statistics recorded. {covers}"
        console.print(f"[yellow]{thinned}[/yellow]", highlight=False, soft_wrap=True)
    if reason := (run.run.get("model") or {}).get("missing_kernels"):
        console.print(f"[yellow]Without compiled kernels, so slower: {escape(reason)}.[/yellow]", soft_wrap=True)
    cautions, sentences = warnings(known), [bound_sentence(known, run.config), *traffic_sentences(known)]
    if imported and not any(share for limit, share in known["bound_by"].items() if limit != "none"):
        sentences[0] = "The log names no limit that left a request out, which does not say that none did."
    if run.endpoint:
        from ifbbench.report.client_side import client_sentences, client_warnings

        cautions += client_warnings(run, known)
        sentences = [*client_sentences(known), *traffic_sentences(known)]
    for warning in cautions:
        console.print(f"[yellow]{warning}[/yellow]", highlight=False, soft_wrap=True)
    console.print()
    words = words_of(run.config)
    forms: list[tuple[Table | None, ...]] = [
        (_throughput_table(known, run.config), _throughput_table(known, run.config, pairs=1)),
        (_bound_table(known, words), _bound_table(known, words, with_bars=False)),
        (_latency_table(known),),
        (_slo_table(known),),
        *((_group_table(known, title),) for title in ("by_class", "by_priority")),
        (_fleet_table(known),),
    ]
    for tables in forms:
        if found := [table for table in tables if table is not None]:
            print_fitting(console, *found)
            console.print()
    sentences += fleet_sentences(known) + tier_sentences(known)
    if energy := known.get("energy"):
        sentences.append(energy_sentence(energy))
    if (expected := known.get("expected_error")) and expected["compared"]:
        sentences.append(expected_error_sentence(expected))
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    print_profile(run, console)
    _print_failures(run, console)


def warnings(known: dict[str, Any]) -> list[str]:
    """What a reader must know before the figures: what they cover, and that the run was overloaded."""
    found = []
    if (window := known.get("steady_state")) is not None:
        length = significant(window["end_s"] - window["start_s"])
        found.append(
            f"Steady state: the figures cover {length} s, from t = {significant(window['start_s'])} s to "
            f"{significant(window['end_s'])} s, between ramp-up and drain."
        )
    elif "steady_state" in known:
        found.append("No steady state was found: the figures cover the whole run.")
    if causes := _replay_causes(known.get("replay_differs") or {}):
        found.append(f"A replay of this recording may decide otherwise: {'; '.join(causes)}.")
    if known.get("overloaded"):
        growth = significant(known["queue_growth_requests_per_s"])
        found.append(
            f"Overloaded: the queue grew by {growth} requests/s while requests arrived. "
            "Latencies say how long the run was, not how fast the engine is."
        )
    return found


def _replay_causes(differs: dict[str, Any]) -> list[str]:
    """Why a replay of a server's recording may have another schedule."""
    causes = []
    if stopped := differs.get("stopped_before_output"):
        causes.append(f"requests stopped before their first token, which a replay gives them: {count(stopped)}")
    if delays := differs.get("host_delays"):
        unit, scale = time_unit([differs["host_delay_s"]])
        causes.append(
            f"times that the host was late and moved the simulated time on: {count(delays)}, "
            f"{significant(differs['host_delay_s'], scale)} {unit} in all"
        )
    return causes


def settings_line(run: RunData) -> str:
    """The settings of a run in one line: trace, policy and limits, model and device."""
    config, trace = run.config, run.run.get("trace") or {}
    words = words_of(config)
    chunking = words.chunked if config.get("enable_chunked_context") else None
    sizes = [f"{words.setting_name(limit)} {size}" for limit in SIZES if (size := config.get(setting_of(limit)))]
    types = [name for name, applies in BATCHING_TYPES.items() if applies(config)]
    where = " on ".join(str(config[name]) for name in ("model", "device", "endpoint") if config.get(name))
    engine = f"with {config['engine_overhead']}" if config.get("engine_overhead") else None
    gpus = [f"{name} {size}" for name, field in SIZES_OF_GPUS.items() if (size := config.get(field) or 1) > 1]
    gpus += [f"MTP {config['draft_mtp']}"] if config.get("draft_mtp") else []
    dtype = (run.run.get("model") or {}).get("quantization") or config.get("dtype")
    replicas = f"{config['replicas']} × {config.get('router')}" if config.get("router") else None
    if run.is_disaggregated:
        replicas = f"{config['prefill_replicas']} prefill + {config['decode_replicas']} decode × {config['router']}"
    parts = [trace.get("name"), replicas, run.decided_by, *sizes, chunking, *types, where, *gpus, engine, dtype]
    return " · ".join(str(part) for part in parts if part)


def bound_sentence(known: dict[str, Any], config: dict[str, Any]) -> str:
    """Which limits left requests out or cut their chunks, for how long, and how much waiting they caused."""
    shares, requests, failures = known["bound_by"], known.get("requests") or {}, ""
    if requests.get("failed"):  # limits of an iteration do not explain these
        failed = f"{count(requests['failed'])} of {count(requests['total'])} requests"
        failures = f" {failed} failed without a complete answer; the reasons are listed below."
    if known["iterations"] is None:
        return f"Iterations and their limits are unknown: --recording summary leaves them out.{failures}"
    if not known["iterations"]:
        return f"No iteration was run.{failures}"
    by_time, waited_s = known.get("bound_by_time") or shares, known.get("waiting_by_limit") or {}
    total_s = sum(waited_s.values())
    binding = [name for name in shares if name != "none" and shares[name] > 0]
    binding.sort(key=lambda name: (-waited_s.get(name, 0.0), -by_time.get(name, 0.0)))
    if not binding and failures:
        return f"No limit left an admitted request out: every iteration ran all of them.{failures}"
    if not binding:
        return "No limit left any request out: every iteration ran all that had arrived."
    sentences = []
    for name in binding:
        if name == Limit.PREFILL.value:  # SGLang's: the requests that it holds do not wait
            time = percent(by_time.get(name))
            sentences.append(f"Running requests stood aside for prompts {time} of the time.")
            continue
        words = f"{_limit_in_words(name, known, config)} left work out {percent(by_time.get(name))} of the time"
        if total_s:
            words += f" and caused {percent(waited_s.get(name, 0.0) / total_s)} of the waiting"
        if waited_s.get(name):
            words += f" ({significant(waited_s[name])} request-seconds)"
        sentences.append(f"{words[0].upper() if words.startswith(('the ', 'waiting ')) else words[0]}{words[1:]}.")
    return " ".join(sentences) + failures


def traffic_sentences(known: dict[str, Any]) -> list[str]:
    """The bursts of arrivals that most of the slow requests came in, and how fairly classes were served."""
    found = []
    for burst in known.get("bursts", ())[:1]:
        others = known["bursts"][1:]
        slow = f"{count(burst['slow_requests'])} of the {count(known['slow_requests'])} requests with a TTFT over "
        more = f"; {count(sum(other['slow_requests'] for other in others))} in {len(others)} more" if others else ""
        found.append(
            f"{slow}{significant(known['slow_ttft_s'])} s arrived in one burst of {significant(burst['duration_s'])} s "
            f"at t = {significant(burst['start_s'])} s, at {significant(burst['rate_per_s'])} requests/s "
            f"({significant(burst['rate_over_mean'])} times the mean){more}."
        )
    if known.get("fairness_index") is not None:
        found.append(
            f"Fairness among classes (Jain's index of tokens/s of a request): {significant(known['fairness_index'])}."
        )
    return found


def energy_sentence(energy: dict[str, Any]) -> str:
    """What the GPUs of a simulated run took. energy: of `summary.json`."""
    parts = [
        f"{significant(energy[f'joules_per_{name}'])} J per {name.replace('_', ' ')}"
        for name in ("output_token", "request")
        if energy[f"joules_per_{name}"] is not None
    ]
    return f"Power: {significant(energy['power_w_per_gpu'])} W per GPU; {', '.join(parts)}."


def expected_error_sentence(expected: dict[str, Any]) -> str:
    """How far the figures of a simulated run may be from a real server's. expected: of a run that was compared."""
    bands = [
        f"{label} is within {100 * low:+.0f} to {100 * high:+.0f} %"
        for key, label in EXPECTED_ERRORS.items()
        if key in expected
        for low, high in [expected[key]]
    ]
    times, of = round(10 * expected["coverage"]), f"{count(expected['rows'])} published measurements"
    text = f"Expected error: in {times} of 10 servers like this {', '.join(bands)} of the prediction ({of}"
    if "curves" in expected:  # not in runs of earlier versions
        text += f" of {count(expected['curves'])} deployments, {expected['of']}"
    text += ")."
    if "too_few" in expected:
        text += f" There are too few measurements of {expected['too_few']}: the range is that of {expected['of']}."
    return text


def _limit_in_words(name: str, known: dict[str, Any], config: dict[str, Any]) -> str:
    if name == "kv_blocks":
        _, pool, of = peak_blocks(known)
        of_cache = words_of(config).blocks(config.get("tokens_per_block"))
        return "the KV cache" if pool is None else f"the KV cache ({count(pool)} {of_cache}{of})"
    if name == "lora_pages":
        pages = f" ({count(known['lora']['device_pages'])} pages)" if known.get("lora") else ""
        return f"the cache of LoRA adapters{pages}"
    words, setting = words_of(config), setting_of(name)
    if not setting:
        return f"waiting for {words.waits_for(name)}" if name in words.limits else name
    size = f" ({config[setting]})" if config.get(setting) else ""
    return words.setting_name(name) + size


def peak_blocks(known: dict[str, Any]) -> tuple[int | None, int | None, str]:
    """The most KV blocks in use, and all of them; with several attention windows those of the fullest one, which the
    third value names."""
    blocks = known.get("kv_blocks") or {}
    if windows := blocks.get("per_window_size"):
        used = {size: (window["peak_used"], window["max"]) for size, window in windows.items()}
        size = fullest_window(used)
        return *used[size], f", window {int(size):,}"
    return blocks.get("peak_used"), blocks.get("max"), ""


def _throughput_table(known: dict[str, Any], config: dict[str, Any], pairs: int = 2) -> Table:
    """pairs: a name and a figure of each row."""
    requests, (peak, pool, of_window) = known["requests"], peak_blocks(known)
    words = words_of(config)
    are_known = known["request_throughput_per_s"] is not None  # else they are not in the log that was imported
    completed = f"{count(requests['completed'])} of {count(requests['total'])}" if are_known else NOTHING
    if requests["failed"]:
        completed += f" ([red]{count(requests['failed'])} failed[/red])"
    table = Table.grid(padding=(0, 3))
    for style in ("dim", None) * pairs:
        table.add_column(style=style)
    rows = [
        ("Requests completed", completed, "Iterations", count(known["iterations"])),
        ("Duration", f"{significant(known['duration_s'])} s", words.pauses.capitalize(), count(known["pauses"])),
        (
            "Request throughput",
            f"{significant(known['request_throughput_per_s'])} requests/s" if are_known else NOTHING,
            "Recomputed tokens",
            count(known["recomputed_tokens"]),
        ),
        (
            "Output throughput",
            f"[bold]{significant(known['output_throughput_tokens_per_s'])} tokens/s[/bold]",
            "Prefix hit rate",
            percent(known.get("prefix_hit_rate")),
        ),
        (
            "Total throughput",
            f"{significant(known['total_throughput_tokens_per_s'])} tokens/s",
            f"KV {words.blocks(config.get('tokens_per_block'))}, peak use",
            f"{count(peak)} of {count(pool)} ({percent(peak / pool)}){of_window}"
            if peak is not None and pool
            else NOTHING,
        ),
    ]
    if known.get("padding_waste"):
        rows.append(("Empty slots", count(known["empty_generation_slots"]), "Padding", percent(known["padding_waste"])))
    if lora := known.get("lora"):
        rows.append(
            (
                "LoRA hit rate",
                percent(lora["hit_rate"]),
                "LoRA pages, peak use",
                f"{count(lora['peak_device_pages'])} of {count(lora['device_pages'])}",
            )
        )
    rows += _arrival_rows(known.get("arrivals") or {})
    halves = [*(row[:2] for row in rows), *(row[2:] for row in rows)]
    for row in halves if pairs == 1 else rows:
        table.add_row(*row)
    return table


def _arrival_rows(arrivals: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rate at which requests arrived, and how late the client submitted them; nothing if all came at once."""
    if not arrivals or arrivals["achieved_rate_per_s"] is None:
        return []
    asked, late_s = arrivals["requested_rate_per_s"], arrivals["lateness_s"]
    rate = f"{significant(arrivals['achieved_rate_per_s'])} requests/s"
    unit, scale = time_unit([late_s["max"]])
    late = f"{significant(late_s['mean'], scale)} {unit} mean, {significant(late_s['max'], scale)} {unit} max"
    asked_text = f" of {significant(asked)}" if asked else " (set by responses)"
    return [("Arrivals", rate + asked_text, "Lateness", late if late_s["max"] else "none")]


def _latency_table(known: dict[str, Any]) -> Table:
    # One unit for all, so that rows and columns can be compared.
    unit, scale = common_unit([known])
    table = plain_table(f"Latency ({unit})", numbers=STATISTICS.values())
    for key, title in LATENCIES.items():
        values = [(known.get(key) or {}).get(name) for name in STATISTICS]
        table.add_row(title, *(significant(value, scale) for value in values))
    return table


def common_unit(groups: Iterable[dict[str, Any]]) -> tuple[str, float]:
    """Milliseconds, or microseconds where most latencies are far below one."""
    values = [(known.get(key) or {}).get("p50") for known in groups for key in LATENCIES]
    unit, scale = time_unit([value for value in values if value])
    return (unit, scale) if unit == "µs" else ("ms", 1e3)


def _bound_table(known: dict[str, Any], words: Words, with_bars: bool = True) -> Table | None:
    """The share of each limit in the time, the waiting and the iterations; None where they are unknown."""
    shares = {key: values for key in LIMIT_SHARES if (values := known.get(key))}
    if not shares:
        return None
    table = plain_table("Bound by")
    for key in shares:
        heading, cells = LIMIT_SHARES[key]
        if cells and with_bars:
            table.add_column("")
        table.add_column(heading, justify="right")
    names = dict.fromkeys((*BINDING, *(name for values in shares.values() for name in values)))
    del names["none"]
    for name in (*names, "none"):
        row = [escape(words.limit_name(name))]  # reasons of a user policy have their own names
        for key, values in shares.items():
            share, cells = values.get(name, 0.0) / (sum(values.values()) or 1.0), LIMIT_SHARES[key][1]
            if cells and with_bars:
                row.append(f"[{'dim' if name == 'none' else 'cyan'}]{bar(share, cells)}[/]")
            row.append(percent(share))
        table.add_row(*row)
    return table


def _slo_table(known: dict[str, Any]) -> Table | None:
    """Service level objectives, and the goodput."""
    if not known.get("slo"):
        return None
    unit, scale = common_unit([known])
    table = plain_table("Objective", numbers=[f"target ({unit})", f"reached ({unit})", "of requests"])
    table.add_column("")
    for name, one in known["slo"].items():
        met = "[green]met[/green]" if one["met"] else "[red]missed[/red]"
        reached, share = significant(one["value"], scale), one.get("share")
        table.add_row(name.replace("p99_9", "p99.9"), significant(one["target"], scale), reached, percent(share), met)
    if known.get("goodput_share") is not None:
        goodput = f"{significant(known['goodput_requests_per_s'])} requests/s"
        table.add_row("[bold]goodput[/bold]", "", "", percent(known["goodput_share"]), f"[bold]{goodput}[/bold]")
    return table


def _group_table(known: dict[str, Any], title: str) -> Table | None:
    """The main figures of each class or priority."""
    groups: dict[str, dict[str, Any]] | None = known.get(title)
    if not groups:
        return None
    unit, scale = common_unit(groups.values())
    has_goodput = any(group.get("goodput_share") is not None for group in groups.values())
    headings = ("requests", *(f"{heading}\n({unit})" for heading in GROUP_COLUMNS), "output\ntokens/s")
    numbers = (*headings, "goodput") if has_goodput else headings
    table = plain_table(title.removeprefix("by_").capitalize(), numbers=numbers)
    for name, group in groups.items():
        latencies = (
            significant((group.get(key) or {}).get(statistic), scale) for key, statistic in GROUP_COLUMNS.values()
        )
        row = [
            escape(name),
            count(group["requests"]["total"]),
            *latencies,
            significant(group["output_throughput_tokens_per_s"]),
        ]
        table.add_row(*row, *([percent(group["goodput_share"])] if has_goodput else []))
    return table


def _fleet_table(known: dict[str, Any]) -> Table | None:
    """The main figures of each replica of a fleet."""
    replicas: list[dict[str, Any]] = (known.get("fleet") or {}).get("replicas") or []
    if not replicas:
        return None
    unit, scale = common_unit(replicas)
    columns = {"Queue time p99": ("queue_time_s", "p99")} | dict(list(GROUP_COLUMNS.items())[:4])
    headings = ("requests", *(f"{heading}\n({unit})" for heading in columns), "output\ntokens/s", "hit rate", "KV peak")
    table = plain_table("Replica", numbers=headings)
    if differ := any(one.get("settings") for one in replicas):
        table.add_column("settings")
    for one in replicas:
        blocks, latencies = (
            one.get("kv_blocks") or {},
            ((one.get(key) or {}).get(name) for key, name in columns.values()),
        )
        peak, pool = blocks.get("peak_used"), blocks.get("max")
        table.add_row(
            f"{one['replica']} {one.get('side', '')}".strip(),
            count(one["requests"]["total"]),
            *(significant(value, scale) for value in latencies),
            significant(one["output_throughput_tokens_per_s"]),
            percent(one.get("prefix_hit_rate")),
            percent(peak / pool) if peak is not None and pool else NOTHING,
            *([_settings_text(one.get("settings") or {})] if differ else []),
        )
    return table


def _settings_text(settings: Mapping[str, Any]) -> str:
    """Settings of a replica in a cell: a device by its name alone."""
    device = str(settings.get("device", "")).removeprefix("sim:")
    others = (f"{name} {as_text(value)}" for name, value in settings.items() if name != "device")
    return escape(", ".join(filter(None, (device, *others))))


def fleet_sentences(known: dict[str, Any]) -> list[str]:
    """How many GPUs a fleet had for how long, and how unevenly its router divided the work."""
    fleet = known.get("fleet") or {}
    if not fleet.get("replicas"):
        return []
    gpus = f"{count(fleet['gpus'])} GPU{'s' if fleet['gpus'] != 1 else ''}"
    number = len(fleet["replicas"])
    text = f"{number} replica{'s' if number > 1 else ''} behind {fleet['router']}: {gpus}, "
    text += f"{significant(fleet['gpu_hours'])} GPU hours"
    if (cost := fleet.get("cost")) is not None:
        text += f", {significant(cost)} USD"
        if per_million := fleet.get("cost_per_million_output_tokens"):
            text += f" ({significant(per_million)} USD per million output tokens)"
    text += "."
    if number == 1:
        return [text]
    transfers = fleet.get("transfers") or {}
    if transfers.get("count"):
        mean_ms = significant(transfers["transfer_s"]["mean"] * 1e3)
        text += f" {count(transfers['count'])} transfers of {memory_size(transfers['bytes'])}, {mean_ms} ms on average."
    more = {name: share for name, share in (fleet.get("imbalance") or {}).items() if share}
    parts = [f"{significant(share)} times the mean of {name.replace('_', ' ')}" for name, share in more.items()]
    return [f"{text} At most, a replica has {', '.join(parts)}." if parts else text]


def tier_sentences(known: dict[str, Any]) -> list[str]:
    """What came from the stores beneath the device memory, and what went there."""
    found = []
    for name, one in (known.get("kv_tiers") or {}).items():
        share = percent(one["loaded_tokens"] / known["prompt_tokens"]) if known.get("prompt_tokens") else "none"
        loaded, stored, evicted = (count(one[f"{what}_tokens"]) for what in ("loaded", "stored", "evicted"))
        text = (
            f"{TIER_NAMES.get(name, name)}: {loaded} tokens ({share} of those of prompts) loaded, {stored} written, "
            f"and {evicted} given up for others."
        )
        if waiting := one["max_waiting_writes"]:
            text += f" Up to {count(waiting)} writes of a replica waited for those before them."
        found.append(text)
    return found


def _print_failures(run: RunData, console: Console) -> None:
    if run.summary is not None and not run.summary["requests"]["failed"]:
        return
    failed = run.requests[run.requests["outcome"] == "failed"]
    if failed.empty:
        return
    console.print()
    console.print(f"[red]{len(failed)} failed request{'s' if len(failed) > 1 else ''}[/red]", highlight=False)
    for request, error in list(zip(failed["request_id"], failed["error"], strict=True))[:FAILURES_SHOWN]:
        console.print(f"  {request}: {error}", highlight=False, markup=False, soft_wrap=True)
    if (more := len(failed) - FAILURES_SHOWN) > 0:
        console.print(f"  and {more} more in {find_lines(run.path, 'requests')}", highlight=False)
