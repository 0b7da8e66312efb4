// The charts of a sweep, as SVG: throughput against latency, metrics against a setting, heat maps. Marks of points that the
// filter leaves out are faint; a click on a mark shows its point.

// A line is narrower than those before it and has other dashes, so that equal ones are seen on each other.
const LINES = COLOURS.series, DASHES = ["", "7 4", "2 3", "9 3 2 3"], FAINT = "var(--line)";
const MAX_LINES = LINES.length, LOG_FROM = 8, WIDTH = 460, HEIGHT = 290, PLOT = { left: 62, right: 14, top: 26, bottom: 42 };

/** A value of a setting: 250000 as 250k; the end of a path. */
function short(value) {
  if (value === null) return "–";
  if (typeof value !== "number") return String(value).split("/").pop();
  const pair = Math.abs(value) < 1e5 ? null : [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size);
  return pair ? `${Number((value / pair[0]).toPrecision(3))}${pair[1]}` : String(value);
}

/** The unit of values of a kind, and the number of them in the unit of the data. */
function unitFor(kind, values) {
  if (kind === "share") return ["%", 100];
  if (kind !== "time") return ["", 1];
  const known = values.filter(value => value > 0).sort((a, b) => a - b);
  return unitOf(known[known.length >> 1] || 1);
}
const named = (label, unit) => (unit ? `${label} (${unit})` : label);

function svgElement(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Axes with `draw(add, x, y)`, where x and y give the place of a value. x: { low, high, log } or { places: [labels] }. */
function axesOf(label, xName, x, yName, y, draw) {
  const svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label}. The table has the same values.` });
  const add = (tag, attributes, text) => { const made = svgElement(tag, attributes, text); svg.append(made); return made; };
  const { left, right, top, bottom } = PLOT, width = WIDTH - left - right, height = HEIGHT - top - bottom;
  const share = (axis, value) => (axis.high === axis.low ? 0.5 : axis.log
    ? Math.log(value / axis.low) / Math.log(axis.high / axis.low) : (value - axis.low) / (axis.high - axis.low));
  const atX = x.places ? place => left + (place + 0.5) / x.places.length * width : value => left + (0.03 + 0.94 * share(x, value)) * width;
  const atY = value => top + (1 - share(y, value)) * height;
  add("text", { x: left, y: 14, class: "name" }, label);
  for (const [mark, text] of marksOf(y, 5)) {
    add("line", { x1: left, x2: WIDTH - right, y1: atY(mark), y2: atY(mark), stroke: "var(--line)" });
    add("text", { x: left - 6, y: atY(mark) + 4, "text-anchor": "end" }, text);
  }
  const every = x.places ? Math.ceil(x.places.length / Math.max(Math.floor(width / (Math.max(...x.places.map(text => text.length)) * 7 + 10)), 1)) : 1;
  const marks = x.places ? x.places.map((text, place) => [place, text]).filter((_, place) => place % every === 0) : marksOf(x, 5);
  for (const [mark, text] of withRoom(marks, atX)) {
    add("line", { x1: atX(mark), x2: atX(mark), y1: HEIGHT - bottom, y2: HEIGHT - bottom + 4, stroke: "var(--muted)" });
    add("text", { x: atX(mark), y: HEIGHT - bottom + 16, "text-anchor": "middle" }, text);
  }
  add("text", { x: left + width / 2, y: HEIGHT - 6, "text-anchor": "middle" }, xName);
  add("text", { x: 12, y: top + height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${top + height / 2})` }, yName);
  draw(add, atX, atY);
  return svg;
}

/** The ticks of an axis and their texts; those that are given, or round ones. */
function marksOf(axis, wanted) {
  if (axis.marks) return axis.marks;
  return axis.log ? logTicks(axis.low, axis.high, wanted) : ticks(axis.low, axis.high, wanted);
}

function axisOf(values, fromZero) {
  const low = Math.min(...values), high = Math.max(...values);
  if (!values.length) return { low: 0, high: 1 };
  if (low > 0 && high / low >= LOG_FROM && !fromZero) return { low: low / 1.15, high: high * 1.15, log: true };
  return fromZero ? { low: 0, high: high * 1.08 || 1 } : { low: low - (high - low || high || 1) * 0.05, high: high + (high - low || high || 1) * 0.05 };
}

/** The style of the line of group `k`, and a piece of it for a key. */
const lineStyle = k => ({ stroke: LINES[k], "stroke-width": Math.max(3.2 - 0.5 * k, 1.4), "stroke-dasharray": DASHES[k % DASHES.length] });
function lineKey(k) {
  const svg = svgElement("svg", { width: 30, height: 8, "aria-hidden": "true", style: "vertical-align:middle" });
  svg.append(svgElement("line", { x1: 0, x2: 30, y1: 4, y2: 4, ...lineStyle(k) }));
  return svg;
}

/** A mark of a point, with what a click and the pointer on it do. Circles of points that miss an objective are empty. */
function mark(sweep, add, i, tag, attributes) {
  const shown = sweep.shown.has(i), empty = tag === "circle" && sweep.points[i].meets === false ? { fill: "var(--ground)", stroke: attributes.fill, "stroke-width": 1.5 } : {};
  return add(tag, { ...attributes, ...empty, class: sweep.selected === i ? "mark selected" : "mark", opacity: shown ? 1 : 0.15, "data-point": i,
    onclick: () => sweep.select(i), onpointermove: event => sweep.hover(i, event), onpointerleave: () => sweep.hover(null) });
}

/** The points (latency, throughput) that no other point beats in both, by latency. */
function paretoFront(points) {
  const front = [];
  for (const one of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) if (!front.length || one.y > front[front.length - 1].y) front.push(one);
  return front;
}

const THROUGHPUT = "output_throughput_tokens_per_s", LATENCIES = [["TTFT p99", "ttft_s.p99"], ["TPOT p99", "tpot_s.p99"], ["E2E p99", "e2e_s.p99"]];

function drawPareto(sweep) {
  return LATENCIES.filter(([, key]) => sweep.figures[key]).map(([label, key]) => {
    const complete = sweep.order.filter(i => sweep.points[i].complete), [unit, scale] = unitFor("time", complete.map(i => sweep.figure(key, i)));
    const points = complete.map(i => ({ i, x: sweep.figure(key, i) * scale, y: sweep.figure(THROUGHPUT, i) })).filter(one => Number.isFinite(one.x) && one.x > 0 && Number.isFinite(one.y));
    const front = paretoFront(points.filter(one => sweep.shown.has(one.i)));
    return axesOf(`Output tokens/s against ${label}`, named(label, unit), axisOf(points.map(one => one.x)), "output tokens/s", axisOf(points.map(one => one.y), true), (add, x, y) => {
      add("polyline", { points: front.map(one => `${x(one.x).toFixed(1)},${y(one.y).toFixed(1)}`).join(" "), fill: "none", stroke: "var(--ink)", "stroke-width": 1.3, class: "front" });
      for (const one of points) mark(sweep, add, one.i, "circle", { cx: x(one.x), cy: y(one.y), r: 5, fill: sweep.colourOf(sweep.limitOf(one.i)) });
    });
  });
}

/** Each metric against one setting: a line for each combination of the other ones, marks in the colour of the limit. */
function drawCurves(sweep, setting) {
  const ticksOf = sweep.ticks[setting], numeric = ticksOf.every(value => typeof value === "number"), others = sweep.varied.filter(name => name !== setting);
  const groups = new Map();
  for (const i of sweep.order) {
    const name = others.map(other => `${other} ${short(sweep.value(other, i))}`).join(", ");
    groups.set(name, [...(groups.get(name) || []), i]);
  }
  const few = groups.size <= MAX_LINES, names = [...groups.keys()];
  const place = value => (numeric ? value : ticksOf.indexOf(value));
  const ordered = group => [...group].sort((a, b) => place(sweep.value(setting, a)) - place(sweep.value(setting, b)));
  const log = numeric && ticksOf[0] > 0 && ticksOf[ticksOf.length - 1] / ticksOf[0] >= LOG_FROM;
  const marks = ticksOf.map(value => [value, short(value)]);
  const axis = numeric ? { low: ticksOf[0], high: ticksOf[ticksOf.length - 1], log, marks } : { places: ticksOf.map(short) };
  document.getElementById("curves-note").replaceChildren(...(!others.length ? [] : few
    ? [`A line for each ${others.join(" and ")}: `, ...names.flatMap((name, k) => [lineKey(k), ` ${name}   `])]
    : [`A line for each of ${groups.size} combinations of ${others.join(" and ")}.`]));
  return sweep.metrics.map(metric => {
    const all = sweep.order.map(i => sweep.figure(metric.key, i)), [unit, scale] = unitFor(metric.kind, all), known = all.filter(value => value !== null).map(value => value * scale);
    const wide = metric.kind === "time" && known.every(value => value > 0) && Math.max(...known) / Math.min(...known) >= 30;
    return axesOf(`${metric.label} against ${setting}`, setting, axis, named(metric.label, unit), axisOf(known, !wide), (add, x, y) => {
      const knee = sweep.knees[setting];
      if (knee !== null && knee !== undefined) {
        add("line", { x1: x(place(knee)), x2: x(place(knee)), y1: PLOT.top, y2: HEIGHT - PLOT.bottom, stroke: "var(--muted)", "stroke-dasharray": "4 3", class: "knee" });
        add("text", { x: x(place(knee)) + 5, y: HEIGHT - PLOT.bottom - 6 }, `knee: ${short(knee)}`);
      }
      names.forEach((name, k) => {
        const group = ordered(groups.get(name)).filter(i => sweep.figure(metric.key, i) !== null), at = i => [x(place(sweep.value(setting, i))), y(sweep.figure(metric.key, i) * scale)];
        const lit = group.filter(i => sweep.shown.has(i));
        if (numeric) add("polyline", { points: lit.map(i => at(i).map(value => value.toFixed(1)).join(",")).join(" "), fill: "none", ...(few ? lineStyle(k) : { stroke: FAINT, "stroke-width": 1 }) });
        for (const i of group) mark(sweep, add, i, "circle", { cx: at(i)[0], cy: at(i)[1], r: few ? 3.5 + (names.length - 1 - k) * 0.9 : 3, fill: sweep.colourOf(sweep.limitOf(i)), stroke: few && names.length > 1 ? LINES[k] : undefined, "stroke-width": 1.5 });
      });
    });
  });
}

/** Metrics over two settings, a cell for each pair of values; of several points in a cell the best. */
function drawMaps(sweep, rows, columns) {
  const ys = sweep.ticks[rows], xs = sweep.ticks[columns], left = 20 + Math.max(...ys.map(value => short(value).length), 3) * 7, top = 26, bottom = 42;
  const height = top + bottom + Math.max(ys.length, 3) * Math.min(34, 320 / ys.length), cellWidth = (WIDTH - left - 10) / xs.length, cellHeight = (height - top - bottom) / ys.length;
  const cells = new Map();
  for (const i of sweep.order) {
    const key = `${ys.indexOf(sweep.value(rows, i))} ${xs.indexOf(sweep.value(columns, i))}`;
    cells.set(key, [...(cells.get(key) || []), i]);
  }
  const framed = sweep.points.some(one => one.meets) ? " Framed cells meet every objective." : "";
  document.getElementById("maps-note").textContent = (sweep.varied.length > 2 ? "Of the points of a cell, which differ in other settings, the best is shown. Darker is better." : "Darker is better.") + framed;
  const draw = (label, best, fill, text, light) => {
    const svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${label} over ${rows} and ${columns}. The table has the same values.` });
    const add = (tag, attributes, words) => { const made = svgElement(tag, attributes, words); svg.append(made); return made; };
    add("text", { x: left, y: 14, class: "name" }, label);
    ys.forEach((value, y) => add("text", { x: left - 6, y: top + (y + 0.5) * cellHeight + 4, "text-anchor": "end" }, short(value)));
    const every = Math.ceil(xs.length * 44 / (WIDTH - left));
    xs.forEach((value, x) => x % every === 0 && add("text", { x: left + (x + 0.5) * cellWidth, y: height - bottom + 16, "text-anchor": "middle" }, short(value)));
    add("text", { x: left + (WIDTH - left) / 2, y: height - 6, "text-anchor": "middle" }, columns);
    add("text", { x: 10, y: top + (height - top - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${top + (height - top - bottom) / 2})` }, rows);
    for (const [key, members] of cells) {
      const [y, x] = key.split(" ").map(Number), lit = members.filter(i => sweep.shown.has(i)), i = best(lit.length ? lit : members);
      if (i === null) continue;
      const inset = sweep.points[i].meets ? 1.5 : 0, frame = inset ? { stroke: "#ff9f1c", "stroke-width": 2 } : {};
      mark(sweep, add, i, "rect", { x: left + x * cellWidth + inset, y: top + y * cellHeight + inset, width: cellWidth - 1.5 - 2 * inset, height: cellHeight - 1.5 - 2 * inset, fill: fill(i), ...frame });
      if (cellWidth >= 34 && cellHeight >= 13) add("text", { x: left + (x + 0.5) * cellWidth, y: top + (y + 0.5) * cellHeight + 3.5, "text-anchor": "middle", class: light(i) ? "on-dark" : "on-light" }, text(i));
    }
    return svg;
  };
  const bestOf = metric => members => members.filter(i => sweep.figure(metric.key, i) !== null).reduce((found, i) => {
    if (found === null) return i;
    const better = metric.best === "low" ? sweep.figure(metric.key, i) < sweep.figure(metric.key, found) : sweep.figure(metric.key, i) > sweep.figure(metric.key, found);
    return better ? i : found;
  }, null);
  const maps = sweep.metrics.map(metric => {
    const best = bestOf(metric), shown = [...cells.values()].map(best).filter(i => i !== null).map(i => sweep.figure(metric.key, i));
    const low = Math.min(...shown), high = Math.max(...shown), [unit, scale] = unitFor(metric.kind, shown);
    const goodness = i => { const share = high > low ? (sweep.figure(metric.key, i) - low) / (high - low) : 0.5; return metric.best === "low" ? 1 - share : share; };
    return draw(named(metric.label, unit), best, i => `color-mix(in oklab, #08306b ${(goodness(i) * 100).toFixed(0)}%, #e3eef9)`, i => significant(sweep.figure(metric.key, i), scale), i => goodness(i) > 0.5);
  });
  const first = bestOf(sweep.metrics[0] || { key: THROUGHPUT, best: "high" });
  return [...maps, draw("bound by, for most of the time", first, i => sweep.colourOf(sweep.limitOf(i)), i => (cellWidth >= 74 ? sweep.nameOf(sweep.limitOf(i)) : ""), i => sweep.limitOf(i) !== "none")];
}
