// The parts around the timeline: summary, life of a request, distributions, tables.

const figure = (summary, path) => path.split(".").reduce((value, key) => (value === null || value === undefined ? value : value[key]), summary);
const TILES = [
  ["Requests completed", "requests.completed", "count"], ["Duration", "duration_s", "time"],
  ["Output throughput", "output_throughput_tokens_per_s", "tokens/s"], ["Request throughput", "request_throughput_per_s", "requests/s"],
  ["TTFT p50", "ttft_s.p50", "time"], ["TTFT p99", "ttft_s.p99", "time"], ["TPOT p50", "tpot_s.p50", "time"], ["ITL p99", "itl_s.p99", "time"],
  ["E2E p50", "e2e_s.p50", "time"], ["E2E p99", "e2e_s.p99", "time"], ["Queue time p50", "queue_time_s.p50", "time"],
  ["Iterations", "iterations", "count"], [null, "pauses", "count"], ["Tokens computed again", "recomputed_tokens", "count"],
  ["Largest batch", "peak_scheduled_requests", "count"], ["KV blocks, peak use", "kv_blocks.peak_used", "count"], ["Prefix hit rate", "prefix_hit_rate", "share"],
];

function inWords(value, kind) {
  if (value === null || value === undefined) return "–";
  if (kind === "count") return grouped(value);
  if (kind === "time") return inUnit(value);
  if (kind === "share") return percent(value);
  return significant(value);
}

/** The figures of the summary that are known. */
function tilesOf(runs) {
  const tiles = element("div", { class: "tiles" });
  for (const [label, path, kind] of TILES) {
    const isPool = path === "kv_blocks.peak_used";
    const values = runs.map(run => (isPool ? run.header.kv_peak[0] : figure(run.header.summary, path)));
    if (values.every(value => value === null || value === undefined)) continue;
    const rest = isPool ? ` of ${grouped(runs[0].header.kv_peak[1])}${runs[0].header.kv_peak[2]}` : path === "requests.completed" ? ` of ${grouped(figure(runs[0].header.summary, "requests.total"))}` : kind.includes("/") ? ` ${kind}` : "";
    tiles.append(element("div", { class: "tile" }, element("div", { class: "label" }, isPool ? `KV ${runs[0].header.blocks}, peak use` : label || capitalised(`${runs[0].header.pause}s`)),
      element("div", { class: "value", "data-figure": path, "data-value": values[0] }, inWords(values[0], kind), element("small", {}, rest)),
      runs.length > 1 ? element("div", { class: "second", "data-figure-b": path, "data-value": values[1] }, `${inWords(values[1], kind)} in ${runs[1].label}`) : null));
  }
  return tiles;
}

function showSummary(runs, content) {
  const section = document.getElementById("summary");
  section.append(tilesOf(runs));
  for (const run of runs) section.append(element("p", { class: "advice" }, element("strong", {}, runs.length > 1 ? `What held requests in ${run.label}: ` : "What held requests: "), run.header.waited));
  for (const run of runs) for (const best of (run.header.what_if.best || []).filter(one => one.title.startsWith("Recommended"))) {
    const worse = best.worse.length ? `; worse: ${best.worse.join(", ")}` : "";
    section.append(element("p", { class: "advice" }, element("strong", {}, `${best.title}${runs.length > 1 ? `, for ${run.label}` : ""}, of what was tried: `),
      `${best.options}: ${best.effect}${worse}. `, ...best.remarks.map(remark => `${remark} `), element("a", { href: "#what-if" }, "All that was tried")));
  }
  if (runs.length > 1) {
    const found = content.divergence;
    section.append(element("p", { class: "advice", id: "divergence" }, element("strong", {}, "First different decision: "),
      found ? `iteration ${grouped(found.iteration)}. ${runs[0].label}: ${found.a.slice(0, 4).join("; ") || "nothing of its own"} (${found.states[0]}). ${runs[1].label}: ${found.b.slice(0, 4).join("; ") || "nothing of its own"} (${found.states[1]}).` : "none; every iteration decided the same."));
  }
}

function showHeadings(runs) {
  const place = document.getElementById("headings");
  for (const run of runs) {
    const of = [run.header.trace || run.header.name, [run.header.model, run.header.device].filter(Boolean).join(" on ")].filter(Boolean).join(", ");
    place.append(element("h1", {}, runs.length > 1 ? `${run.label}: ${of}` : of), element("p", { class: "settings" }, `${run.header.name} · ${run.header.settings}`));
    if (run.header.partial) place.append(element("p", { class: "partial" }, "Partial: the run did not reach its end; this covers what was recorded."));
    if (run.header.recorded_every > 1) place.append(element("p", { class: "settings" }, `One of ${run.header.recorded_every} iterations is recorded; times between them are interpolated.`));
  }
}

function showLife(state) {
  const section = document.getElementById("life"), chosen = state.selected;
  section.hidden = !chosen;
  section.replaceChildren();
  if (!chosen) return;
  const { run } = chosen.view, life = run.life(chosen.r), of = run.request, r = chosen.r;
  const facts = [["prompt", `${grouped(of.prompt_len[r] || 0)} tokens`], ["output", `${grouped(of.output_len[r] || 0)} tokens`],
    ["queue time", inUnit(of.queue_time_s[r])], ["TTFT", inUnit(of.ttft_s[r])], ["TPOT", inUnit(of.tpot_s[r])], ["E2E", inUnit(of.e2e_s[r])]];
  const rows = groupedStretches(life.stretches).map(group => {
    const a = group[0], b = group[group.length - 1];
    const behind = [...new Set(group.map(one => one.behind))];
    const words = behind.length > 1 ? `waits behind ${grouped(behind.length)} requests in turn, ${run.header.ids[behind[0]]} to ${run.header.ids[behind[behind.length - 1]]}, each of which waits for ${run.words(a.limit)}` : a.reason;
    return [a.from.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 }), ((b.to - a.from) * 1000).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }),
      a.first === b.last ? grouped(a.first) : `${grouped(a.first)} – ${grouped(b.last)}`, words];
  });
  const e2e = of.e2e_s[r];
  section.append(element("button", { class: "close", type: "button", "aria-label": "Close", onclick: () => state.select(null) }, "×"),
    element("h2", {}, `Request ${life.id}${state.views.length > 1 ? ` in ${run.label}` : ""}`),
    element("p", { id: "sentences" }, life.sentences.join(" ")),
    element("p", { class: "note" }, facts.map(([name, value]) => `${name} ${value}`).join(" · ")),
    element("div", { class: "columns" },
      element("div", { class: "scroll" }, table("From its arrival to its end", ["from s", "for ms", "iterations", "the request"], rows, [0, 1, 2])),
      element("div", {}, table("End-to-end time", ["part", "s", "share"], life.parts.map(([name, value]) => [run.header.part_names[name], significant(value), percent(value / e2e)]), [1, 2]),
        element("p", {}, element("button", { type: "button", onclick: () => state.focus(chosen) }, "Zoom to this request")))));
}

function groupedStretches(stretches) {
  const groups = [];
  for (const one of stretches) {
    const last = groups[groups.length - 1], latest = last && last[last.length - 1];
    if (latest && one.behind >= 0 && latest.behind >= 0 && one.limit === latest.limit && one.phase === latest.phase) last.push(one);
    else groups.push([one]);
  }
  return groups;
}

function quantilesOf(run, name) {
  if (name === "itl_s") return run.get("itl_quantiles_s");
  return Float64Array.from(run.request[name]).filter(Number.isFinite).sort();
}

/** The share of values up to each one, on a logarithmic axis where they differ much. */
function distribution(runs, label, name) {
  const ns = "http://www.w3.org/2000/svg", sets = runs.map(run => quantilesOf(run, name));
  const positive = sets.map(values => values.filter(value => value > 0));
  if (!positive.some(values => values.length)) return null;
  const lowest = Math.min(...positive.filter(v => v.length).map(values => values[0])), least = Math.min(...sets.filter(v => v.length).map(values => values[0])), highest = Math.max(...positive.filter(v => v.length).map(values => values[values.length - 1]));
  const log = highest / lowest > 10, high = highest, low = log ? Math.max(lowest, highest / 1e5) : least, W = 360, H = 190, L = 38, R = 12, T = 26, B = 34;
  const at = value => L + (W - L - R) * (high === low ? 0.5 : log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low));
  const svg = document.createElementNS(ns, "svg");
  const add = (tag, attributes, text) => {
    const made = document.createElementNS(ns, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Distribution of ${label}`);
  add("text", { x: L, y: 14, class: "name" }, label);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const y = T + (H - T - B) * (1 - share);
    add("line", { x1: L, x2: W - R, y1: y, y2: y, stroke: "var(--line)" });
    add("text", { x: L - 5, y: y + 4, "text-anchor": "end" }, `${share * 100} %`);
  }
  const [unit, scale] = unitOf(Math.sqrt(lowest * high));
  const marks = low === high ? [[low * scale, significant(low, scale)]] : log ? logTicks(low * scale, high * scale, 5) : ticks(low * scale, high * scale, 4);
  for (const [mark, text] of withRoom(marks, mark => at(mark / scale))) {
    const x = at(mark / scale);
    add("line", { x1: x, x2: x, y1: H - B, y2: H - B + 4, stroke: "var(--muted)" });
    add("text", { x: Math.min(x, W - 2 - 3.4 * text.length), y: H - B + 15, "text-anchor": "middle" }, text);  // not cut at the edge
  }
  add("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, `${label} (${unit})`);
  sets.forEach((values, k) => {
    if (!values.length) return;
    const step = Math.max(1, Math.floor(values.length / 400)), points = [];
    for (let i = 0; i < values.length; i += step) points.push(i);
    if (points[points.length - 1] !== values.length - 1) points.push(values.length - 1);
    const line = points.map(i => `${at(values[i]).toFixed(1)},${(T + (H - T - B) * (1 - i / Math.max(values.length - 1, 1))).toFixed(1)}`);
    const colour = RUN_COLOURS[k];
    add("polyline", { points: line.join(" "), fill: "none", stroke: colour, "stroke-width": 1.8 });
    if (values[0] === values[values.length - 1]) add("circle", { cx: at(values[0]), cy: T, r: 4, fill: colour });
  });
  return svg;
}

const LATENCIES = [["Queue time", "queue_time_s"], ["TTFT", "ttft_s"], ["ITL", "itl_s"], ["TPOT", "tpot_s"], ["E2E", "e2e_s"]];
const STATISTICS = ["mean", "p50", "p90", "p95", "p99", "p99_9", "max"];

function showDistributions(runs) {
  const section = document.getElementById("distributions"), plots = section.querySelector(".plots");
  for (const [label, name] of LATENCIES) {
    const drawn = distribution(runs, label, name);
    if (drawn) plots.append(drawn);
  }
  for (const run of runs) {
    const rows = LATENCIES.filter(([, name]) => run.header.summary[name]).map(([label, name]) => [label, ...STATISTICS.map(statistic => {
      const value = run.header.summary[name][statistic];
      return element("span", { "data-statistic": `${name}.${statistic}` }, value === null ? "–" : significant(value, 1000));
    })]);
    section.append(element("div", { class: "scroll" }, table(runs.length > 1 ? `Latency of ${run.label} (ms)` : "Latency (ms)", ["", ...STATISTICS.map(name => name.replace("99_9", "99.9"))], rows, STATISTICS.map((_, k) => k + 1))));
  }
  if (runs.length > 1) section.append(element("p", { class: "note" }, ...runs.flatMap((run, k) => [element("span", { style: `color:${RUN_COLOURS[k]}` }, "▬ "), `${run.label}   `])));
}

function showWhy(views, state) {
  const why = document.getElementById("why"), slowest = document.getElementById("slowest");
  why.append(element("h2", {}, "What held requests"));
  slowest.append(element("h2", {}, "Slowest requests"));
  for (const view of views) {
    const { run } = view, { header } = run, of = views.length > 1 ? ` of ${run.label}` : "";
    const total = Object.values(header.waiting_s).reduce((a, b) => a + b, 0), names = [...new Set([...Object.keys(header.by_time), ...Object.keys(header.waiting_s)])];
    why.append(table(`Limits${of}`, ["bound by", "of time", "of iterations", "of waiting", ""], names.map(name => {
      const share = total ? (header.waiting_s[name] || 0) / total : 0;
      return [run.nameOf(name), percent(header.by_time[name]), percent(header.by_iterations[name]), percent(share),
        element("span", { class: "bar", style: `width:${(share * 110).toFixed(0)}px` })];
    }), [1, 2, 3]));
    const choose = id => () => state.focus({ view, r: run.idPlace.get(String(id)) });
    if (header.blockers.length) why.append(element("h3", {}, `Held the line${of}`), table("Requests that others waited behind", ["request", "for", "others waited s", "at most"],
      header.blockers.map(one => [one.request_id, run.nameOf(one.limit), significant(one.waited_s), `${grouped(one.max_behind)} request${one.max_behind === 1 ? "" : "s"}`]), [2, 3], header.blockers.map(one => choose(one.request_id))));
    slowest.append(table(`By end-to-end time${of}`, ["request", "E2E s", "TTFT s", "share", "mainly"],
      header.slowest.map(one => [one.request_id, significant(one.e2e_s), significant(one.ttft_s), percent(one.share), one.cause]), [1, 2, 3], header.slowest.map(one => choose(one.request_id))));
  }
}

function showWhatIf(runs) {
  const section = document.getElementById("what-if");
  section.append(element("h2", {}, "Other settings, tried"));
  for (const run of runs) {
    const found = run.header.what_if, of = runs.length > 1 ? `${run.label}: ` : "";
    if (found.sentence) { section.append(element("p", { class: "note" }, of + found.sentence), element("pre", {}, found.command)); continue; }
    for (const best of found.best) section.append(element("p", { class: "advice" }, element("strong", {}, `${of}${best.title}: ${best.options}`), `: ${best.effect}`,
      best.better.length ? `; better: ${best.better.join(", ")}` : "", best.worse.length ? element("span", { class: "worse" }, `; worse: ${best.worse.join(", ")}.`) : "; nothing listed is worse.", ...best.remarks.map(remark => ` ${remark}`)),
    element("p", { class: "note" }, best.heading), ...best.commands.map(command => element("pre", {}, command)));
    if (found.nothing) section.append(element("p", { class: "advice" }, element("strong", {}, of + found.nothing)));
    const cellOf = ([text, change, effect]) => (change ? element("span", {}, `${text} `, element("span", { class: effect }, change)) : element("span", { class: effect }, text));
    section.append(element("p", { class: "note" }, found.window));
    if (found.rows.length || found.own.length > 1) section.append(element("div", { class: "scroll" }, table(of + found.title, ["", ...found.headings],
      [...found.own.map(([name, values]) => [name, ...values]), ...found.rows.map(row => [element("code", { title: row.command }, row.options), ...row.cells.map(cellOf)])], found.headings.map((_, k) => k + 1))),
    element("p", { class: "note" }, found.without), element("p", { class: "note" }, found.to_run), ...(found.to_run ? [element("pre", {}, found.command)] : []));
    section.append(...found.sentences.map(text => element("p", { class: "note" }, text)));
  }
}

const LEDGER_ROWS = 200;
function showLedger(views, state) {
  const section = document.getElementById("ledger");
  section.append(element("h2", {}, capitalised(`${views[0].run.header.pause} ledger`)));
  for (const view of views) {
    const { run } = view, of = views.length > 1 ? `${run.label}: ` : "";
    if (!run.pauses.length) { section.append(element("p", { class: "note" }, `${of}no request was ${run.header.paused}.`)); continue; }
    const sorted = [...run.pauses].sort((a, b) => b.tokens - a.tokens).slice(0, LEDGER_ROWS), sum = name => run.pauses.reduce((total, pause) => total + pause[name], 0);
    section.append(element("p", { class: "note" }, `${of}${grouped(run.pauses.length)} ${run.header.pause}s: ${grouped(sum("tokens"))} tokens computed again, ${significant(sum("lost"))} s lost by the victims, ${significant(sum("gained"))} s gained by the requests that they made room for.${run.pauses.length > LEDGER_ROWS ? ` The ${LEDGER_ROWS} costliest:` : ""}`),
      element("div", { class: "scroll" }, table("The costliest first; click to see it on the timeline", ["time s", "iteration", "victim", "made room for", `${run.header.blocks} freed`, "tokens again", "lost s", "gained s", `its ${run.header.pause} no.`],
        sorted.map(pause => [pause.time.toFixed(3), grouped(pause.iteration), run.header.ids[pause.victim], run.header.ids[pause.beneficiary], pause.blocks === null ? "–" : grouped(pause.blocks), grouped(pause.tokens), significant(pause.lost), significant(pause.gained), pause.nth]),
        [0, 1, 4, 5, 6, 7, 8], sorted.map(pause => () => state.focusPause(view, pause)))));
  }
}

function showConfig(runs) {
  const section = document.getElementById("config");
  section.append(element("h2", {}, "Configuration"));
  const differing = new Set(runs.length > 1 ? Object.keys(runs[0].header.config).filter(name => JSON.stringify(runs[0].header.config[name]) !== JSON.stringify(runs[1].header.config[name])) : []);
  for (const run of runs) {
    const entries = Object.entries(run.header.config).filter(([, value]) => value !== null);
    section.append(element("details", { open: "" }, element("summary", {}, `${entries.length} settings${runs.length > 1 ? ` of ${run.label}` : ""}`),
      element("div", { class: "grid" }, ...entries.map(([name, value]) => element("div", {}, element("span", {}, `${name} `), differing.has(name) ? element("b", {}, String(value)) : String(value))))));
    section.append(element("p", { class: "note" }, Object.entries(run.header.versions).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`).join(" · ")));
  }
}
