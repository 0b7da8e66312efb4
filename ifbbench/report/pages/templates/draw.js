// Colours, and the drawing of strips.

// In the order of the phases of a run. Names are those of the theme.
const THEMED = ["context", "waiting"];
const PHASE_COLOURS = ["context", "generation", "recompute", "paused", "waiting", "skipped"].map(phase => (THEMED.includes(phase) ? phase : COLOURS.phases[phase]));
const REQUEST_COLOURS = COLOURS.requests, RUN_COLOURS = COLOURS.series;

function theme() {
  const style = getComputedStyle(document.documentElement), get = name => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["ground", "panel", "ink", "muted", "line", "accent", "limit", "waiting", "context", "selected"].map(name => [name, get(name)]));
}
function causeColour(run, cause) {
  return (run.header.limit_texts[cause] || run.header.limit_texts.none)[2];
}

/** The colour of a span. */
function spanColour(run, mode, r, i, colours) {
  const phase = run.span.phase[i];
  if (mode === "cause") {
    if (phase === WAITING) return causeColour(run, run.header.causes[run.span.cause[i]]);
    return phase === PAUSED ? PHASE_COLOURS[PAUSED] : colours.line;
  }
  if (mode === "phase" || phase === WAITING || phase === PAUSED) {
    return colours[PHASE_COLOURS[phase]] || PHASE_COLOURS[phase];
  }
  return REQUEST_COLOURS[(mode === "class" ? run.request.class[r] : r) % REQUEST_COLOURS.length];
}

const LEFT = 74, RIGHT = 12, STRIP = 54, GAP = 12, AXIS = 24;

/** The strips below the timeline, top to bottom: name, layers of [series, colour], limit. */
function strips(run) {
  const config = run.header.config, list = [];
  for (const { size, pool, blocks } of run.windows) {
    list.push({ name: ["KV window", grouped(+size)], layers: [[blocks, COLOURS.limits.kv_blocks]], peak: blocks, limit: pool });
  }
  if (run.header.num_kv_blocks && !run.windows.length) {
    list.push({ name: [`KV ${run.header.blocks}`, "used"], layers: [[run.blocks, COLOURS.limits.kv_blocks]], peak: run.blocks, limit: run.header.num_kv_blocks });
  }
  list.push({ name: ["requests in", "the batch"], layers: [[run.generation, PHASE_COLOURS[1]], [run.context, PHASE_COLOURS[0]]], limit: config.max_batch_size });
  list.push({ name: ["tokens in", "the batch"], layers: [[run.budget, COLOURS.limits.num_tokens]], peak: run.budget, limit: config.max_num_tokens });
  list.push({ name: ["requests", "waiting"], layers: [[run.waiting, COLOURS.limits.head_of_line]] });
  list.push({ name: ["bound by"], bound: true, height: 20 });
  return list;
}

/** Means over each pixel as areas, the maximum of each pixel as a line. */
function drawStrip(context, run, strip, top, width, view, colours) {
  const height = strip.height || STRIP;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  context.textBaseline = "middle";
  strip.name.forEach((line, k) => context.fillText(line, LEFT - 8, top + height / 2 + (k - (strip.name.length - 1) / 2) * 13));
  if (strip.bound) {
    drawBound(context, run, top, height, width, view, colours);
    return;
  }
  const means = strip.layers.map(([series]) => series.means(view.from, view.to, width));
  const tops = strip.peak ? strip.peak.maxima(view.from, view.to, width) : null;
  let highest = 0;
  for (let x = 0; x < width; x++) highest = Math.max(highest, means.reduce((sum, values) => sum + values[x], 0), tops ? tops[x] : 0);
  const near = strip.limit && strip.limit <= 3 * highest, scale = height / (Math.max(highest, near ? strip.limit : 0, 1) * 1.32);
  const below = new Float64Array(width);
  strip.layers.forEach(([, colour], layer) => {
    context.fillStyle = colours[colour] || colour;
    context.beginPath();
    context.moveTo(LEFT, top + height);
    const above = new Float64Array(width);
    for (let x = 0; x < width; x++) {
      above[x] = below[x] + means[layer][x];
      context.lineTo(LEFT + x, top + height - above[x] * scale);
      context.lineTo(LEFT + x + 1, top + height - above[x] * scale);
    }
    for (let x = width - 1; x >= 0; x--) context.lineTo(LEFT + x, top + height - below[x] * scale);
    context.fill();
    below.set(above);
  });
  if (tops) {
    context.strokeStyle = colours.ink; context.globalAlpha = 0.55; context.lineWidth = 1;
    context.beginPath();
    for (let x = 0; x < width; x++) context.lineTo(LEFT + x + 0.5, top + height - tops[x] * scale);
    context.stroke();
    context.globalAlpha = 1;
  }
  context.fillStyle = colours.line;
  context.fillRect(LEFT, top + height, width, 1);
  context.textAlign = "left"; context.textBaseline = "top";
  if (near) {
    const y = Math.round(top + height - strip.limit * scale) + 0.5;
    context.strokeStyle = context.fillStyle = colours.limit;
    context.setLineDash([4, 3]);
    context.beginPath(); context.moveTo(LEFT, y); context.lineTo(LEFT + width, y); context.stroke();
    context.setLineDash([]);
    label(context, `limit ${grouped(strip.limit)}`, LEFT + 4, y - 13, colours.limit, colours);
  } else {
    label(context, `up to ${grouped(Math.max(Math.ceil(highest - 1e-9), 0))}${strip.limit ? ` of ${grouped(strip.limit)}` : ""}`, LEFT + 4, top + 1, colours.muted, colours);
  }
}

function label(context, text, x, y, colour, colours) {
  context.fillStyle = colours.ground; context.globalAlpha = 0.75;
  context.fillRect(x - 2, y - 1, context.measureText(text).width + 4, 13);
  context.globalAlpha = 1; context.fillStyle = colour;
  context.fillText(text, x, y);
}

function drawBound(context, run, top, height, width, view, colours) {
  const means = run.boundBy.map(series => series.means(view.from, view.to, width));
  for (let x = 0; x < width; x++) {
    const shares = means.map(values => values[x]), total = shares.reduce((a, b) => a + b, 0);
    if (total < 1e-9) continue;
    let y = top;
    shares.forEach((share, k) => {
      const part = share / total * height;
      if (part <= 0) return;
      context.fillStyle = causeColour(run, run.header.limits[k]);
      context.fillRect(LEFT + x, y, 1, part);
      y += part;
    });
  }
}

function drawTimeAxis(context, top, width, view, colours) {
  const [unit, scale] = unitOf(view.to);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top"; context.fillStyle = colours.muted;
  for (const [value, text] of ticks(view.from * scale, view.to * scale, Math.max(width / 130, 2))) {
    const x = LEFT + (value / scale - view.from) / (view.to - view.from) * width;
    context.fillRect(Math.round(x), top, 1, 4);
    context.textAlign = x > LEFT + width - 40 ? "right" : "center";
    context.fillText(`${text} ${unit}`, x, top + 6);
  }
}
