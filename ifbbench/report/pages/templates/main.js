// Starts the page: reads the data, shows it, and keeps what is visible and selected.

const started = performance.now();

class State {
  constructor(runs, content) {
    this.begin = Math.min(...runs.map(run => run.begin));
    this.end = Math.max(...runs.map(run => run.end), this.begin + 1e-6);
    this.from = this.begin; this.to = this.end;
    this.colour = "phase"; this.rows = "running"; this.arrows = true;
    this.selected = null; this.cursor = null; this.range = null; this.views = []; this.pending = false;
    const found = content.divergence;
    this.divergence = found ? { 0: found.a_start_s, 1: found.b_start_s, iteration: found.iteration } : null;
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const view of this.views) view.draw();
      const [unit, scale] = unitOf(this.to), digits = Math.max(0, 3 - Math.floor(Math.log10(Math.max((this.to - this.from) * scale, 1e-9))));
      const text = [this.from, this.to].map(time => (time * scale).toLocaleString("en-US", { maximumFractionDigits: Math.min(digits, 6) }));
      document.getElementById("window").textContent = `${text[0]} to ${text[1]} ${unit}`;
    });
  }

  /** Show a stretch of time, moved into the run. */
  show(from, to) {
    const least = 1e-4, length = Math.min(Math.max(to - from, least), this.end - this.begin);
    const start = Math.min(Math.max(from, this.begin), this.end - length);
    this.from = start; this.to = start + length;
    this.redraw();
  }
  showAll() { this.show(this.begin, this.end); }
  move(share) { const by = (this.to - this.from) * share; this.show(this.from + by, this.to + by); }
  zoom(factor, about) { this.show(about - (about - this.from) * factor, about + (this.to - about) * factor); }

  select(chosen) {
    this.selected = chosen;
    showLife(this);
    this.redraw();
  }
  /** The request of an id in the first run that has it; null if none has. */
  find(id) {
    const view = this.views.find(one => one.run.idPlace.has(id));
    return view ? { view, r: view.run.idPlace.get(id) } : null;
  }
  /** Select a request and show it from its arrival to its end. */
  focus(chosen) {
    const { run } = chosen.view, from = run.arrives[chosen.r], to = run.leaves[chosen.r], room = (to - from) * 0.08 || 0.01;
    if (Number.isFinite(from)) this.show(from - room, to + room);
    this.select(chosen);
    chosen.view.canvas.scrollIntoView({ block: "nearest" });
  }
  focusPause(view, pause) {
    const length = Math.max(pause.lost * 6, 0.05);
    this.show(pause.time - length / 2, pause.time + length / 2);
    this.select({ view, r: pause.victim });
    view.canvas.scrollIntoView({ block: "nearest" });
  }

  hover(view, x, y, clientX, clientY) {
    const tip = document.getElementById("tooltip");
    const lines = view && x >= LEFT ? describe(view, x, y) : null;
    tip.hidden = !lines;
    view && (view.canvas.style.cursor = lines && y < view.timeline ? "pointer" : "crosshair");
    if (!lines) return;
    tip.replaceChildren(...lines.map((line, k) => element("div", {}, k ? line : element("b", {}, line))));
    const right = clientX + 18 + tip.offsetWidth < innerWidth;
    tip.style.left = `${right ? clientX + 16 : clientX - tip.offsetWidth - 12}px`;
    tip.style.top = `${Math.min(clientY + 16, innerHeight - tip.offsetHeight - 6)}px`;
  }
}

/** What is at a point of a view, in lines. */
function describe(view, x, y) {
  const { run } = view, time = view.time(x), k = run.iterationAt(time), number = run.number[k];
  const general = [`${time.toFixed(3)} s, iteration ${grouped(number)}`,
    `${grouped(run.budget.values[k])} tokens in the batch: ${grouped(run.context.values[k])} context and ${grouped(run.generation.values[k])} generation requests`,
    `${grouped(run.waiting.values[k])} requests wait; bound by ${run.nameOf(run.header.limits[run.bound[k]])}`];
  for (const { size, pool, blocks } of run.windows) general.push(`${grouped(blocks.values[k])} of ${grouped(pool)} KV ${run.header.blocks} of the window of ${grouped(+size)} tokens used`);
  if (run.header.num_kv_blocks && !run.windows.length) general.push(`${grouped(run.blocks.values[k])} of ${grouped(run.header.num_kv_blocks)} KV ${run.header.blocks} used`);
  const found = view.hit(x, y);
  if (!found || found.i < 0) return y < view.timeline && !found ? null : y < view.timeline ? [`Request ${run.header.ids[found.r]}`, "not in the system", general[0]] : general;
  const s = run.span, { r, i } = found, phase = s.phase[i], at = Math.max(0, Math.min(number - s.first[i], s.length[i]));
  let what = run.phaseName(phase);
  if (phase === CONTEXT || phase === RECOMPUTE) {
    const chunk = s.chunks[s.chunkOffset[i] + at];
    what += `: chunk of ${grouped(chunk === undefined ? s.tokens[i] : chunk)} of ${grouped(s.tokens[i])} tokens`;
  } else if (phase === GENERATION) what += `: ${grouped(s.tokens[i])} tokens in this stretch`;
  else if (phase === PAUSED) what += s.cause[i] < 0 ? "" : ` to make room for ${run.header.ids[s.cause[i]]}`;
  else if (phase === WAITING) {
    const held = run.holding(r, i), part = held.find(one => one.first <= number && number <= one.last) || held[held.length - 1];
    what += part.behind < 0 ? ` for ${run.words(part.limit)}` : ` behind ${run.header.ids[part.behind]}, which waits for ${run.words(part.limit)}`;
  }
  return [`Request ${run.header.ids[r]}`, what, `for ${inUnit(s.to[i] - s.from[i])}, iterations ${grouped(s.first[i])} to ${grouped(s.first[i] + s.length[i])}`, ...general.slice(0, 2)];
}

function showLegend(state) {
  const place = document.getElementById("legend"), run = state.views[0].run, entry = (colour, name) => element("span", {}, element("i", { style: `background:${colour}` }), name);
  const seen = new Set(state.views.flatMap(view => [...new Set(view.run.span.phase)]));
  const entries = [];
  if (state.colour === "cause") {
    for (const cause of new Set(state.views.flatMap(view => view.run.header.causes))) entries.push(entry(causeColour(run, cause), run.nameOf(cause)));
    if (seen.has(PAUSED)) entries.push(entry(PHASE_COLOURS[PAUSED], run.header.paused));
  } else if (state.colour === "phase") {
    PHASE_COLOURS.forEach((colour, phase) => seen.has(phase) && entries.push(entry(THEMED.includes(colour) ? `var(--${colour})` : colour, run.phaseName(phase))));
  } else {
    entries.push("Context and recompute are darker.");
    if (state.colour === "class") run.header.classes.forEach((name, k) => entries.push(entry(REQUEST_COLOURS[k % REQUEST_COLOURS.length], name || "no class")));
    if (seen.has(WAITING)) entries.push(entry("var(--waiting)", "waiting"));
    if (seen.has(PAUSED)) entries.push(entry(PHASE_COLOURS[PAUSED], run.header.paused));
  }
  if (state.views.some(view => view.run.pauses.length)) entries.push(entry("var(--selected)", `${run.header.pause} ▸, arrow to the request that it made room for`));
  entries.push("bound by: ", ...[...new Set(state.views.flatMap(view => view.run.header.limits))].map(limit => entry(causeColour(run, limit), run.nameOf(limit))));
  place.replaceChildren(...entries);
}

function listen(state) {
  const by = id => document.getElementById(id), middle = () => (state.from + state.to) / 2;
  by("zoom-in").onclick = () => state.zoom(0.5, middle());
  by("zoom-out").onclick = () => state.zoom(2, middle());
  by("zoom-all").onclick = () => state.showAll();
  by("colour").onchange = event => { state.colour = event.target.value; showLegend(state); state.redraw(); };
  by("rows").onchange = event => { state.rows = event.target.value; state.redraw(); };
  by("pause").textContent = state.views[0].run.header.pause;
  by("arrows").onchange = event => { state.arrows = event.target.checked; state.redraw(); };
  by("search").oninput = event => {
    const text = event.target.value, ids = state.views[0].run.header.ids;
    const found = text ? ids.filter(id => id.startsWith(text)).slice(0, 12) : [];
    by("found").replaceChildren(...found.map(id => element("option", { value: id })));
  };
  by("search").onchange = event => {
    const text = event.target.value.trim(), found = state.find(text);
    event.target.setCustomValidity(text && !found ? `No request ${text}` : "");
    event.target.reportValidity();
    if (found) state.focus(found);
  };
  onTheme(() => state.redraw());
  addEventListener("resize", () => state.redraw());
}

/** What tells two runs apart: the settings that differ, or their names. */
function labelRuns(runs) {
  if (runs.length < 2) { runs[0].label = runs[0].header.name; return; }
  const [a, b] = runs.map(run => run.header.config), ignored = new Set(["output", "overwrite", "quiet", "recording_format"]);
  const names = Object.keys(a).filter(name => !ignored.has(name) && JSON.stringify(a[name]) !== JSON.stringify(b[name]));
  runs.forEach((run, k) => {
    const text = names.slice(0, 3).map(name => (["policy", "device", "model", "type"].includes(name) ? "" : `${name} `) + [a, b][k][name]).join(", ");
    run.label = names.length && names.length <= 3 ? text : run.header.name;
  });
  if (runs[0].label === runs[1].label) runs.forEach((run, k) => { run.label += k ? " (b)" : " (a)"; });
}

async function start() {
  const content = JSON.parse(document.getElementById("data").textContent);
  const runs = await Promise.all(content.runs.map(header => Run.load(header)));
  labelRuns(runs);
  const state = new State(runs, content);
  showHeadings(runs);
  showSummary(runs, content);
  runs.forEach((run, place) => {
    const holder = element("div", { class: "view" }, runs.length > 1 ? element("h3", {}, run.label) : null);
    document.getElementById("views").append(holder);
    state.views.push(new View(run, state, holder, place));
  });
  // What is at most a page of rows is shown with the waiting requests too; where requests are short, rows would be
  // hairlines, and lanes are not.
  const short = run => { const lives = quantilesOf(run, "e2e_s"); return lives.length && lives[lives.length >> 1] < (run.end - run.begin) / 60; };
  if (runs.some(run => run.requests > 60 && short(run))) state.rows = document.getElementById("rows").value = "lanes";
  else if (runs.every(run => run.requests <= TIMELINE)) state.rows = document.getElementById("rows").value = "all";
  showLegend(state);
  listen(state);
  state.redraw();
  showDistributions(runs);
  showWhy(state.views, state);
  showWhatIf(runs);
  showLedger(state.views, state);
  showConfig(runs);
  document.getElementById("loading").remove();
  globalThis.ifbbench = { state, runs };
  // run.html#request=46 begins with that request.
  const named = /^#request=(.+)$/.exec(location.hash), chosen = named && state.find(decodeURIComponent(named[1]));
  if (chosen) state.select(chosen);
  requestAnimationFrame(() => { document.documentElement.dataset.readyMs = Math.round(performance.now() - started); });
}

start().catch(error => {
  document.getElementById("loading").textContent = `This page could not be shown: ${error.message}`;
  throw error;
});
