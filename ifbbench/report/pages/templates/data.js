// A run as arrays: its iterations, spans and requests, and what they say of any stretch of time.

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };
const CONTEXT = 0, GENERATION = 1, RECOMPUTE = 2, PAUSED = 3, WAITING = 4, SKIPPED = 5;
const IN_BATCH = new Set([CONTEXT, GENERATION, RECOMPUTE, SKIPPED]);
const BEHIND = "head_of_line", QUEUE = "batch_size", CONCURRENCY = "concurrency";
const BLOCK = 64;

async function inflated(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function summed(values) {
  const sums = new Float64Array(values.length);
  let sum = 0;
  for (let i = 0; i < values.length; i++) sums[i] = sum += values[i];
  return sums;
}

/** The last position of ascending `values` in [from, to) that is not above `value`; from - 1 if there is none. */
function lastUpTo(values, value, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= value) from = middle + 1; else to = middle;
  }
  return from - 1;
}

/** Values of the iterations, with sums so that the mean of any stretch of time takes one look. */
class Series {
  constructor(run, values, holds) {
    this.run = run; this.values = values;
    const n = values.length, sums = new Float64Array(n + 1);
    for (let i = 0; i < n; i++) sums[i + 1] = sums[i] + values[i] * run.lasts(i, holds);
    this.sums = sums; this.holds = holds;
    const blocks = new Float64Array(Math.ceil(n / BLOCK));
    for (let i = 0; i < n; i++) if (values[i] > blocks[(i / BLOCK) | 0]) blocks[(i / BLOCK) | 0] = values[i];
    this.blocks = blocks;
    this.highest = 0;
    for (const value of blocks) if (value > this.highest) this.highest = value;
  }
  /** The sum of value times seconds up to `time`, which is in iteration `i` or behind it. */
  integral(time, i) {
    if (!this.holds) while (i > 0 && time < this.run.alone[i]) i--;
    if (i < 0) return 0;
    const begin = this.holds ? this.run.start[i] : this.run.alone[i];
    return this.sums[i] + this.values[i] * Math.max(0, Math.min(time - begin, this.run.lasts(i, this.holds)));
  }
  /** The mean of each of `width` equal parts of a stretch of time. */
  means(from, to, width) {
    const { times, places } = this.run.edges(from, to, width), found = new Float64Array(width), length = (to - from) / width;
    let before = this.integral(times[0], places[0]);
    for (let x = 0; x < width; x++) {
      const upTo = this.integral(times[x + 1], places[x + 1]);
      found[x] = (upTo - before) / length;
      before = upTo;
    }
    return found;
  }
  maxima(from, to, width) {
    const { places } = this.run.edges(from, to, width), found = new Float64Array(width);
    for (let x = 0; x < width; x++) found[x] = this.maximum(Math.max(places[x], 0), places[x + 1]);
    return found;
  }
  /** The largest value of iterations `i` to `end`. */
  maximum(i, end) {
    let found = 0;
    while (i <= end) {
      if (i % BLOCK === 0 && i + BLOCK <= end) { found = Math.max(found, this.blocks[i / BLOCK]); i += BLOCK; }
      else { found = Math.max(found, this.values[i]); i++; }
    }
    return found;
  }
}

class Run {
  static async load(header) { return new Run(header, await inflated(header.data)); }

  constructor(header, buffer) {
    this.header = header;
    const get = name => {
      const [kind, offset, length] = header.arrays[name];
      return new TYPES[kind](buffer, offset, length);
    };
    this.get = get;
    this.number = summed(get("iteration.number"));
    this.start = summed(get("iteration.start_us")).map(us => us / 1e6);
    this.duration = Float64Array.from(get("iteration.duration_us"), us => us / 1e6);
    const delivery = get("iteration.delivery_us");
    this.delivered = this.start.map((start, i) => start + this.duration[i] + delivery[i] / 1e6);
    this.count = this.number.length;
    this.dense = this.number[this.count - 1] - this.number[0] === this.count - 1;
    // Begin and end of each iteration alone: with overlap, one begins when those before have ended.
    this.alone = new Float64Array(this.count); this.until = new Float64Array(this.count);
    for (let i = 0, latest = -Infinity; i < this.count; i++) {
      this.alone[i] = Math.max(this.start[i], latest);
      this.until[i] = latest = Math.max(latest, this.start[i] + this.duration[i]);
    }
    this.end = this.start[this.count - 1] + this.duration[this.count - 1];
    this.begin = Math.min(0, this.start[0]);
    this.bound = get("iteration.bound");
    const series = (values, holds) => new Series(this, values, holds);
    this.blocks = series(get("iteration.used_blocks"), true);
    // Of several attention windows: its tokens, the blocks in use, and all of them.
    this.windows = Object.entries(header.windows).sort((a, b) => b[0] - a[0]).map(([size, pool]) => ({ size, pool, blocks: series(get(`iteration.used_blocks.${size}`), true) }));
    this.waiting = series(get("iteration.waiting"), true);
    this.budget = series(get("iteration.budget"), false);
    this.context = series(get("iteration.context"), false);
    this.generation = series(get("iteration.generation"), false);
    this.boundBy = header.limits.map((_, place) => series(Uint8Array.from(this.bound, one => +(one === place)), false));
    this.readRequests();
    this.readSpans();
  }

  /** How long iteration `i` lasts, or until the next one begins if its value holds until then. */
  lasts(i, holds) {
    return holds && i + 1 < this.count ? this.start[i + 1] - this.start[i] : this.until[i] - this.alone[i];
  }
  startOf(iteration) { return this.timeOf(iteration, this.start); }
  endOf(iteration) {
    const i = this.place(iteration);
    return this.timeOf(iteration, this.start) + this.duration[i];
  }
  deliveredAt(iteration) { return this.timeOf(Math.max(iteration, 0), this.delivered); }
  place(iteration) {
    if (this.dense) return Math.min(Math.max(iteration - this.number[0], 0), this.count - 1);
    return Math.max(lastUpTo(this.number, iteration), 0);
  }
  timeOf(iteration, times) {
    const i = this.place(iteration);
    if (this.dense || i + 1 >= this.count || this.number[i] >= iteration) return times[i];
    return times[i] + (times[i + 1] - times[i]) * (iteration - this.number[i]) / (this.number[i + 1] - this.number[i]);
  }
  iterationAt(time) { return Math.max(lastUpTo(this.start, time), 0); }

  readRequests() {
    const request = {};
    for (const name of Object.keys(this.header.arrays)) {
      if (name.startsWith("request.")) request[name.slice(8)] = this.get(name);
    }
    this.request = request;
    this.requests = this.header.ids.length;
    this.idPlace = new Map(this.header.ids.map((id, place) => [id, place]));
  }

  readSpans() {
    const get = this.get, offset = get("span.offset"), n = get("span.first").length;
    this.span = { offset, first: get("span.first"), length: get("span.length"), phase: get("span.phase"), tokens: get("span.tokens"),
      cause: get("span.cause"), chunkOffset: get("span.chunk_offset"), chunks: get("span.chunks"),
      from: new Float64Array(n), to: new Float64Array(n) };
    const s = this.span;
    this.arrives = new Float64Array(this.requests); this.leaves = new Float64Array(this.requests);
    this.runsFrom = new Float64Array(this.requests);
    for (let r = 0; r < this.requests; r++) {
      const arrival = this.request.arrival_s[r], ended = this.request.end_s[r];
      const low = offset[r], high = offset[r + 1];
      for (let i = low; i < high; i++) {
        s.from[i] = Math.max(this.startOf(s.first[i]), arrival || 0);
        // An iteration that begins while the one before still runs counts from the end of that, as in attributions.
        if (i > low && IN_BATCH.has(s.phase[i - 1]) && IN_BATCH.has(s.phase[i])) {
          s.from[i] = Math.max(s.from[i], this.deliveredAt(s.first[i] - this.header.micro_batches));
        }
      }
      for (let i = low; i < high; i++) {
        s.to[i] = i + 1 < high ? s.from[i + 1] : Number.isFinite(ended) ? ended : this.endOf(s.first[i] + s.length[i]);
      }
      this.arrives[r] = Number.isFinite(arrival) ? arrival : low < high ? s.from[low] : Infinity;
      this.leaves[r] = low < high ? s.to[high - 1] : this.arrives[r];
      let first = low;
      while (first < high && s.phase[first] === WAITING) first++;
      this.runsFrom[r] = first < high ? s.from[first] : Infinity;
    }
    this.pauses = this.header.ledger.map(row => ({ iteration: row[0], victim: row[1], beneficiary: row[2], blocks: row[3],
      tokens: row[4], lost: row[5], gained: row[6], nth: row[7], time: this.startOf(row[0]) }));
  }

  /** The edges of equal parts of a stretch of time, and the last iteration that began up to each. */
  edges(from, to, width) {
    const key = `${from} ${to} ${width}`;
    if (this.edgesKey !== key) {
      const times = new Float64Array(width + 1), places = new Int32Array(width + 1);
      for (let x = 0; x <= width; x++) {
        times[x] = from + (to - from) * x / width;
        places[x] = lastUpTo(this.start, times[x], Math.max(x ? places[x - 1] : 0, 0));
      }
      this.edgesKey = key; this.edgesFound = { times, places };
    }
    return this.edgesFound;
  }

  /** The span of a request at a time; -1 if there is none. */
  spanAt(r, time) {
    const low = this.span.offset[r], high = this.span.offset[r + 1];
    const i = lastUpTo(this.span.from, time, low, high);
    return i >= low && time <= this.span.to[i] ? i : -1;
  }

  /** What held the request of a waiting span, in order of time: itself at the head of the line, or behind another. */
  holding(r, i) {
    const s = this.span, first = s.first[i], last = first + s.length[i], cause = this.header.causes[s.cause[i]];
    // Before its time in the queue, the client may have held it back.
    const arrived = s.offset[r] + (this.header.causes[s.cause[s.offset[r]]] === CONCURRENCY ? 1 : 0);
    const named = this.header.names_queue_head, queued = i === arrived && (named || cause === QUEUE);
    if (cause !== BEHIND && !queued) return [{ first, last, limit: cause, behind: -1 }];
    const starts = this.get("head.start"), offset = this.get("head.offset"), rank = this.get("head.rank");
    const who = this.get("head.request"), limits = this.get("head.limit"), own = this.request.rank[r], held = [];
    for (let place = Math.max(lastUpTo(starts, first), 0); place < starts.length && starts[place] <= last; place++) {
      const end = place + 1 < starts.length ? starts[place + 1] - 1 : last;
      let head = -1;
      for (let k = offset[place]; k < offset[place + 1] && rank[k] < own; k++) head = k;
      let limit = head < 0 ? (queued ? (named ? "none" : QUEUE) : null) : this.header.head_limits[limits[head]], behind = head < 0 ? -1 : who[head];
      // In the queue it may be the head of the line itself.
      for (let k = offset[place]; queued && k < offset[place + 1]; k++) {
        if (who[k] === r) { limit = this.header.head_limits[limits[k]]; behind = -1; break; }
      }
      const part = { first: Math.max(starts[place], first), last: Math.min(end, last), limit, behind };
      const latest = held[held.length - 1];
      if (latest && latest.limit === part.limit && latest.behind === part.behind) latest.last = part.last;
      else held.push(part);
    }
    return held;
  }

  phaseName(phase) {
    if (phase === SKIPPED) return this.header.config.type === "v1" ? "empty slot" : this.header.skipped[0];
    return phase === RECOMPUTE ? `recompute after a ${this.header.pause}` : phase === PAUSED ? this.header.paused : this.header.phases[phase];
  }
  nameOf(limit) { return (this.header.limit_texts[limit] || [limit])[0]; }
  words(limit) { return (this.header.limit_texts[limit] || [])[1] || limit || "a decision that is not recorded"; }

  /** What a request did from its arrival to its end, as `ifbbench why --request` tells it. */
  life(r) {
    const s = this.span, id = this.header.ids, low = s.offset[r], high = s.offset[r + 1], stretches = [];
    if (low < high && s.from[low] > this.arrives[r] + 1e-9) {
      stretches.push({ phase: "arrival", from: this.arrives[r], to: s.from[low], first: s.first[low], last: s.first[low],
        reason: "waits for the next iteration to begin" });
    }
    for (let i = low; i < high; i++) {
      const first = s.first[i], last = first + s.length[i], phase = this.header.phases[s.phase[i]], tokens = s.tokens[i];
      const base = { phase, from: s.from[i], to: s.to[i], first, last };
      const steps = last - first + 1, iterations = `${grouped(steps)} iteration${steps > 1 ? "s" : ""}`;
      if (s.phase[i] === WAITING) {
        const parts = this.holding(r, i), bounds = parts.map(part => Math.max(this.startOf(part.first), s.from[i]));
        parts.forEach((part, k) => stretches.push({ phase, first: part.first, last: part.last, limit: part.limit, behind: part.behind,
          from: k ? bounds[k] : s.from[i], to: k + 1 < parts.length ? bounds[k + 1] : s.to[i],
          reason: part.behind < 0 ? `waits for ${this.words(part.limit)}`
            : `waits behind ${id[part.behind]}, which waits for ${this.words(part.limit)}` }));
      } else if (s.phase[i] === PAUSED) {
        stretches.push({ ...base, reason: `is ${this.header.paused} to make room for ${s.cause[i] < 0 ? "another request" : id[s.cause[i]]}` });
      } else if (s.phase[i] === SKIPPED) {
        stretches.push({ ...base, reason: this.header.skipped[1] });
      } else if (s.phase[i] === GENERATION) {
        stretches.push({ ...base, reason: `generates ${grouped(tokens)} token${tokens > 1 ? "s" : ""}` });
      } else {
        const count = s.chunkOffset[i + 1] - s.chunkOffset[i], verb = s.phase[i] === CONTEXT ? "computes its prompt" : `computes again what the ${this.header.pause} dropped`;
        stretches.push({ ...base, reason: `${verb}: ${grouped(tokens)} token${tokens > 1 ? "s" : ""}${count > 1 ? ` in ${count} chunks` : ""} in ${iterations}` });
      }
    }
    return { id: id[r], stretches, parts: this.parts(r), sentences: this.sentences(r, stretches) };
  }

  /** The parts of a request's end-to-end time, the longest first. */
  parts(r) {
    return this.header.parts.map(name => [name, this.get(`attribution.${name}`)[r]]).filter(part => part[1] > 0)
      .sort((a, b) => b[1] - a[1]);
  }

  sentences(r, stretches) {
    const of = this.request, id = this.header.ids[r], outcome = this.header.outcomes[of.outcome[r]];
    if (this.header.errors[r]) return [`Request ${id} failed: ${this.header.errors[r]}`];
    if (outcome === "running") return [`Request ${id} had not ended when the recording did.`];
    if (!(of.e2e_s[r] > 0)) return [`Request ${id}: ${outcome}.`];
    const waits = this.parts(r).filter(([name]) => name.startsWith("waiting") || name.startsWith("paused"));
    const waited = waits.reduce((sum, part) => sum + part[1], 0), e2e = of.e2e_s[r];
    const text = [`Request ${id} arrived at ${of.arrival_s[r].toFixed(3)} s, had its first token after ${of.ttft_s[r].toFixed(3)} s and its last after ${e2e.toFixed(3)} s.`];
    if (of.least_s && Number.isFinite(of.least_s[r])) text[0] += ` Alone on the device it takes at least ${of.least_s[r].toFixed(3)} s.`;
    if (!waits.length || waits[0][1] < 0.01 * e2e) return [...text, "No limit held it back for more than 1 % of that time."];
    text.push(`It waited or was ${this.header.paused} for ${percent(waited / e2e)} of that time.`);
    const idle = stretches.filter(one => one.phase === "waiting" || one.phase === "paused");
    if (idle.length) {
      const longest = idle.reduce((a, b) => (b.to - b.from > a.to - a.from ? b : a));
      text.push(`The longest stretch, ${(longest.to - longest.from).toFixed(3)} s from ${longest.from.toFixed(3)} s: it ${longest.reason}.`);
    }
    const pauses = of.pauses[r];
    if (pauses) text.push(`It was ${this.header.paused} ${pauses} time${pauses > 1 ? "s" : ""} and computed ${grouped(of.recomputed_tokens[r])} tokens again.`);
    return text;
  }

  /** The lowest free lane of each request that ever runs, and how many lanes there are. */
  get lanes() {
    if (this._lanes) return this._lanes;
    const order = [...Array(this.requests).keys()].filter(r => this.runsFrom[r] < Infinity)
      .sort((a, b) => this.runsFrom[a] - this.runsFrom[b]);
    const of = new Int32Array(this.requests).fill(-1), ends = [];
    for (const r of order) {
      let lane = ends.findIndex(end => end <= this.runsFrom[r] + 1e-9);
      if (lane < 0) { lane = ends.length; ends.push(0); }
      ends[lane] = this.leaves[r]; of[r] = lane;
    }
    return (this._lanes = { of, count: Math.max(ends.length, 1), order });
  }
}
