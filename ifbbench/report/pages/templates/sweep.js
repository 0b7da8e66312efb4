// The page of a sweep: the table of its points, the filter, and what is shown of one point.

const started = performance.now();

class Sweep {
  constructor(content) {
    Object.assign(this, content);
    this.all = content.points.map((_, i) => i);
    this.order = this.all;
    this.shown = new Set(this.all);
    this.selected = null;
    this.sorted = { key: null, down: false };
  }

  figure(key, i) { const values = this.figures[key]; return values ? values[i] : null; }
  value(name, i) { return this.points[i].values[this.over.indexOf(name)]; }
  nameOf(limit) { return (this.limits[limit] || [limit])[0]; }
  colourOf(limit) { return (this.limits[limit] || this.limits.none)[1]; }
  /** The limit that bound the point for most of the time; `none` if it has no figures. */
  limitOf(i) {
    const shares = Object.entries(this.points[i].shares);
    return shares.reduce((most, one) => (one[1] > most[1] ? one : most), ["none", 0])[0];
  }
  titleOf(i) { return this.over.map(name => `${name}=${short(this.value(name, i))}`).join(", "); }

  select(i) {
    this.selected = i;
    showPoint(this);
    for (const one of document.querySelectorAll("tr.selected, .mark.selected")) one.classList.remove("selected");
    for (const one of document.querySelectorAll(`tr[data-row="${i}"], .mark[data-point="${i}"]`)) one.classList.add("selected");
  }
  hover(i, event) {
    const tip = document.getElementById("tooltip");
    tip.hidden = i === null;
    if (i === null) return;
    const lines = [this.titleOf(i), ...this.metrics.map(metric => `${metric.label}: ${inKind(metric.kind, this.figure(metric.key, i))}`), `bound by ${boundBy(this, i)}`];
    tip.replaceChildren(...lines.map((line, k) => element("div", {}, k ? line : element("b", {}, line))));
    tip.style.left = `${event.clientX + 18 + tip.offsetWidth < innerWidth ? event.clientX + 16 : event.clientX - tip.offsetWidth - 12}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 6)}px`;
  }

  redraw() {
    const into = (id, charts) => document.querySelector(`#${id} .plots`).replaceChildren(...charts);
    const by = id => document.getElementById(id).value;
    showTable(this);
    document.getElementById("count").textContent = `${grouped(this.shown.size)} of ${grouped(this.all.length)} points`;
    into("pareto", drawPareto(this));
    into("curves", drawCurves(this, by("against")));
    if (this.varied.length > 1) into("maps", drawMaps(this, by("map-rows"), by("map-columns")));
  }

  /** Show the points that have every word of `text`, or satisfy it where it compares a setting or figure. */
  filter(text, limit) {
    const words = text.trim().split(/\s+/).filter(Boolean), compared = words.map(word => /^([^<>=]+)(<=|>=|=|<|>)(.+)$/.exec(word));
    const holds = i => words.every((word, k) => {
      const found = compared[k], name = found && found[1];
      if (!found || !(this.over.includes(name) || this.figures[name])) return this.text(i).includes(word.toLowerCase());
      const value = this.over.includes(name) ? this.value(name, i) : this.figure(name, i), wanted = Number(found[3]);
      if (value === null) return false;
      if (typeof value !== "number" || Number.isNaN(wanted)) return found[2] === "=" && String(value).toLowerCase() === found[3].toLowerCase();
      return { "<": value < wanted, "<=": value <= wanted, ">": value > wanted, ">=": value >= wanted, "=": value === wanted }[found[2]];
    });
    this.shown = new Set(this.all.filter(i => holds(i) && (!limit || this.limitOf(i) === limit)));
    this.redraw();
  }
  text(i) { return `${this.titleOf(i)} ${this.nameOf(this.limitOf(i))} ${this.points[i].error || ""}`.toLowerCase(); }

  sortBy(key) {
    const down = this.sorted.key === key ? !this.sorted.down : (this.columns.find(one => one.key === key) || {}).best === "high";
    this.sorted = { key, down };
    const value = i => (key === "bound" ? this.nameOf(this.limitOf(i)) : this.over.includes(key) ? this.value(key, i) : this.figure(key, i));
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    this.order = [...this.all].sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (one === null || other === null) return (one === null) - (other === null);
      return (down ? -1 : 1) * compare(one, other) || a - b;
    });
    this.redraw();
    document.querySelector(`#table button[data-key="${key}"]`).focus();
  }
}

function inKind(kind, value) {
  if (value === null || value === undefined) return "–";
  if (kind === "time") return inUnit(value);
  return kind === "share" ? percent(value) : significant(value);
}

function boundBy(sweep, i) {
  const shares = sweep.points[i].shares, limit = sweep.limitOf(i), total = Object.values(shares).reduce((sum, one) => sum + one, 0);
  return total ? `${sweep.nameOf(limit)}, ${percent(shares[limit] / total)} of the time` : "–";
}

/** The shares of the limits in the time of a point, as a bar. */
function sharesBar(sweep, i) {
  const shares = Object.entries(sweep.points[i].shares).filter(([, share]) => share > 0);
  const bar = element("span", { class: "shares", role: "img", "aria-label": boundBy(sweep, i) }, ...shares.map(([limit, share]) =>
    element("i", { style: `width:${(share * 90).toFixed(1)}px;background:${sweep.colourOf(limit)}` })));
  return element("span", { style: "white-space:nowrap" }, bar, shares.length ? ` ${sweep.nameOf(sweep.limitOf(i))}` : "–");
}

/** A text that may be cut behind its underscores. */
const breakable = text => text.split("_").flatMap((part, k, parts) => (k < parts.length - 1 ? [`${part}_`, element("wbr")] : [part]));

function showTable(sweep) {
  const { columns, over } = sweep, shown = sweep.order.filter(i => sweep.shown.has(i)), focused = document.activeElement && document.activeElement.dataset.row;
  const complete = shown.filter(i => sweep.points[i].complete), heads = [...over.map(name => [name, name]), ["bound", "bound by (time)"], ...columns.map(one => [one.key, one.heading])];
  const units = columns.map(one => unitFor(one.kind, complete.map(i => sweep.figure(one.key, i)))), bests = columns.map(one => {
    const values = complete.map(i => sweep.figure(one.key, i)).filter(value => value !== null);
    const best = one.best && values.length > 1 ? Math[one.best === "low" ? "min" : "max"](...values) : null;
    return values.filter(value => value === best).length === 1 ? best : null;
  });
  const sort = key => (sweep.sorted.key !== key ? "none" : sweep.sorted.down ? "descending" : "ascending");
  const head = element("tr", {}, ...heads.map(([key, text], k) => element("th", { scope: "col", "aria-sort": sort(key), class: k > over.length ? "number" : undefined },
    element("button", { type: "button", "data-key": key, onclick: () => sweep.sortBy(key) }, ...breakable(text), (k > over.length && units[k - over.length - 1][0] ? ` ${units[k - over.length - 1][0]}` : ""), sort(key) === "none" ? null : sort(key) === "ascending" ? " ▲" : " ▼"))));
  const cells = i => columns.map((one, k) => {
    const value = sweep.figure(one.key, i), best = value !== null && value === bests[k] && sweep.points[i].complete;
    const text = value === null ? "–" : one.kind === "number" && Number.isInteger(value) ? grouped(value) : significant(value, units[k][1]);
    return element("td", { class: best ? "number best" : "number", "data-figure": one.key, "data-value": value, title: best ? "the best of the column" : undefined }, text);
  });
  const rows = shown.map(i => element("tr", { class: sweep.selected === i ? "link selected" : "link", tabindex: 0, "data-row": i, "aria-label": sweep.titleOf(i), onclick: () => sweep.select(i), onkeydown: event => onRowKey(sweep, i, event) },
    ...over.map((name, k) => element("td", {}, ...breakable(short(sweep.value(name, i))), ...(k ? [] : metMark(sweep.points[i])))),
    ...(sweep.points[i].error ? [element("td", { colspan: columns.length + 1, class: "partial" }, sweep.points[i].error)] : [element("td", {}, sharesBar(sweep, i)), ...cells(i)])));
  document.getElementById("table").replaceChildren(element("table", {}, element("caption", { class: "hidden" }, "The points of the sweep and their figures"), element("thead", {}, head), element("tbody", {}, ...rows)));
  if (focused !== undefined) document.querySelector(`tr[data-row="${focused}"]`)?.focus({ preventScroll: true });
}

/** A mark behind a point that meets every objective. */
function metMark(point) {
  if (!point.meets) return [];
  const text = point.best ? "the best of the points that meet every objective" : "meets every objective";
  return [element("span", { class: "met", title: text, role: "img", "aria-label": text }, point.best ? " ✓ best" : " ✓")];
}

function onRowKey(sweep, i, event) {
  const row = event.currentTarget, next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
  if (next) { event.preventDefault(); next.focus(); }
  else if (event.key === "Enter") sweep.select(i);
}

const isTime = key => /(^|\.)[a-z0-9_]*_s(\.|$)/.test(key) && !key.includes("_per_s"), isShare = key => /(_share|hit_rate|padding_waste)$|^bound_by/.test(key);

function showPoint(sweep) {
  const section = document.getElementById("point"), i = sweep.selected;
  section.hidden = i === null;
  section.replaceChildren();
  if (i === null) return;
  const point = sweep.points[i], copied = element("span", { role: "status" });
  const copy = () => navigator.clipboard.writeText(point.command).then(() => { copied.textContent = " copied"; }, () => { copied.textContent = " select the text to copy it"; });
  const figures = Object.keys(sweep.figures).filter(key => sweep.figure(key, i) !== null);
  const text = key => (isTime(key) ? inUnit(sweep.figure(key, i)) : isShare(key) ? percent(sweep.figure(key, i)) : Number.isInteger(sweep.figure(key, i)) ? grouped(sweep.figure(key, i)) : significant(sweep.figure(key, i)));
  const grid = entries => element("div", { class: "grid" }, ...entries.map(([name, value]) => element("div", {}, element("span", {}, `${name} `), value)));
  section.append(...[element("button", { class: "close", type: "button", "aria-label": "Close", onclick: () => sweep.select(null) }, "×"),
    element("h2", {}, sweep.titleOf(i)),
    point.error ? element("p", { class: "partial" }, point.error) : element("p", {}, `${sweep.metrics.map(metric => `${metric.label} ${inKind(metric.kind, sweep.figure(metric.key, i))}`).join(" · ")} · bound by ${boundBy(sweep, i)}`),
    element("h3", {}, "Command"), element("pre", { id: "command" }, point.command),
    element("p", {}, element("button", { type: "button", onclick: copy }, "Copy the command"), copied, ...point.runs.map((run, k) => element("a", { href: run, class: "run" }, point.runs.length > 1 ? `The page of repeat ${k + 1}` : "The page of this run"))),
    figures.length ? element("details", { open: "" }, element("summary", {}, `${figures.length} figures`), grid(figures.map(key => [key, element("span", { "data-all": key, "data-value": sweep.figure(key, i), style: "color:var(--ink)" }, text(key))]))) : null].filter(Boolean));
  section.scrollIntoView({ block: "nearest" });
}

function start() {
  const sweep = new Sweep(JSON.parse(document.getElementById("data").textContent)), by = id => document.getElementById(id);
  const { subject, over, varied } = sweep;
  const failed = sweep.points.filter(one => one.error).length;
  by("headings").append(element("h1", {}, `Sweep over ${over.join(" and ")}${subject ? `: ${subject}` : ""}`),
    element("p", { class: "settings" }, `${sweep.name} · ${grouped(sweep.points.length)} points${failed ? `, ${grouped(failed)} failed` : ""}`),
    ...(sweep.best ? [element("p", { class: "settings" }, sweep.best)] : []));
  const limits = [...new Set(sweep.all.map(i => sweep.limitOf(i)))];
  by("limit").append(...limits.map(limit => element("option", { value: limit }, sweep.nameOf(limit))));
  by("legend").append("bound by: ", ...[...new Set(sweep.points.flatMap(one => Object.keys(one.shares).filter(limit => one.shares[limit] > 0)))].map(limit => element("span", {}, element("i", { style: `background:${sweep.colourOf(limit)}` }), sweep.nameOf(limit))),
    ...(sweep.points.some(one => one.meets === false) ? [element("span", {}, "empty marks miss an objective")] : []));
  const options = () => (varied.length ? varied : over).map(name => element("option", { value: name }, name));
  by("against").append(...options());
  for (const id of ["map-rows", "map-columns"]) by(id).append(...options());
  by("maps").hidden = varied.length < 2;
  if (varied.length > 1) by("map-columns").value = varied[1];
  const filter = () => sweep.filter(by("filter").value, by("limit").value);
  by("filter").oninput = filter;
  by("limit").onchange = filter;
  by("against").onchange = () => sweep.redraw();
  for (const [id, other] of [["map-rows", "map-columns"], ["map-columns", "map-rows"]]) {
    by(id).onchange = () => {
      if (by(id).value === by(other).value) by(other).value = varied.find(name => name !== by(id).value);
      sweep.redraw();
    };
  }
  onTheme(() => sweep.redraw());
  addEventListener("keydown", event => event.key === "Escape" && sweep.select(null));
  const common = Object.entries(sweep.common);
  by("config").append(element("h2", {}, "Settings of all points"), element("details", {}, element("summary", {}, `${common.length} settings`),
    element("div", { class: "grid" }, ...common.map(([name, value]) => element("div", {}, element("span", {}, `${name} `), String(value))))));
  sweep.redraw();
  globalThis.ifbbench = { sweep };
  requestAnimationFrame(() => { document.documentElement.dataset.readyMs = Math.round(performance.now() - started); });
}

start();
