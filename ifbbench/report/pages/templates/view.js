// The timeline of one run and its strips, on one canvas. It draws what is visible: of more requests than there are
// rows of pixels, one for each row, and every pause.

const TIMELINE = 430, MAX_ROW = 20, MIN_NAMED_ROW = 9, MAX_ARROWS = 150, CLICK = 4;

class View {
  constructor(run, state, element, place) {
    this.run = run; this.state = state; this.place = place;
    this.strips = strips(run);
    this.timeline = Math.min(TIMELINE, Math.max(run.requests * MAX_ROW, 3 * MAX_ROW));
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Timeline of ${run.header.name}: ${grouped(run.requests)} requests in ${grouped(run.count)} iterations. Arrow keys move, plus and minus zoom, up and down choose a request, which is described below.`);
    element.append(this.canvas);
    this.height = this.timeline + AXIS + this.strips.reduce((sum, strip) => sum + (strip.height || STRIP) + GAP, 0) + 8;
    this.canvas.style.height = `${this.height}px`;
    this.measure();
    this.listen();
  }

  /** Reads the width of the canvas once for each drawing: the browser lays out the page for it. */
  measure() { this.width = Math.max(this.canvas.clientWidth - LEFT - RIGHT, 50); }
  x(time) { return LEFT + (time - this.state.from) / (this.state.to - this.state.from) * this.width; }
  time(x) { return this.state.from + (x - LEFT) / this.width * (this.state.to - this.state.from); }

  /** The requests of the rows from top to bottom, and the row of each; in lanes, several share one. */
  layout() {
    const { run, state } = this, key = `${state.rows} ${state.from} ${state.to}`;
    if (this.key === key) return;
    this.key = key;
    this.rowOf = new Int32Array(run.requests).fill(-1);
    this.shown = [];
    for (let r = 0; r < run.requests; r++) {
      const begins = state.rows === "all" ? run.arrives[r] : run.runsFrom[r];
      if (begins < state.to && run.leaves[r] > state.from) this.shown.push(r);
    }
    if (state.rows === "lanes") {
      this.shown = run.lanes.order.filter(r => run.runsFrom[r] < state.to && run.leaves[r] > state.from);
      for (const r of this.shown) this.rowOf[r] = run.lanes.of[r];
      this.count = run.lanes.count;
    } else {
      this.shown.forEach((r, row) => { this.rowOf[r] = row; });
      this.count = Math.max(this.shown.length, 1);
    }
    this.rowHeight = Math.min(this.timeline / this.count, MAX_ROW);
  }

  y(r) { return this.rowOf[r] * this.rowHeight; }

  draw() {
    this.measure();
    const ratio = window.devicePixelRatio || 1, { canvas, state, run, width } = this;
    if (canvas.width !== Math.round(canvas.clientWidth * ratio)) canvas.width = Math.round(canvas.clientWidth * ratio);
    if (canvas.height !== Math.round(this.height * ratio)) canvas.height = Math.round(this.height * ratio);
    const context = canvas.getContext("2d", { alpha: false }), colours = theme();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colours.ground;
    context.fillRect(0, 0, canvas.clientWidth, this.height);
    this.layout();
    context.save();
    context.beginPath(); context.rect(LEFT, 0, width, this.timeline); context.clip();
    this.drawRows(context, colours);
    this.drawPauses(context, colours);
    this.drawDivergence(context, colours, 0, this.timeline);
    context.restore();
    this.drawNames(context, colours);
    drawTimeAxis(context, this.timeline, width, state, colours);
    let top = this.timeline + AXIS + 6;
    for (const strip of this.strips) {
      drawStrip(context, run, strip, top, Math.floor(width), state, colours);
      top += (strip.height || STRIP) + GAP;
    }
    this.drawDivergence(context, colours, this.timeline + AXIS, this.height);
    if (state.cursor !== null) {
      const x = Math.round(this.x(state.cursor)) + 0.5;
      if (x >= LEFT) {
        context.strokeStyle = colours.muted; context.globalAlpha = 0.6; context.lineWidth = 1;
        context.beginPath(); context.moveTo(x, 0); context.lineTo(x, this.height); context.stroke();
        context.globalAlpha = 1;
      }
    }
    if (state.range && state.range.view === this) {
      context.fillStyle = colours.accent; context.globalAlpha = 0.18;
      context.fillRect(state.range.from, 0, state.range.to - state.range.from, this.height);
      context.globalAlpha = 1;
    }
  }

  drawRows(context, colours) {
    const { run, state, rowHeight } = this, lanes = state.rows === "lanes";
    const gap = rowHeight >= 4 ? Math.min(1.5, rowHeight * 0.2) : 0;
    if (rowHeight >= 1 || lanes) {
      const covered = lanes ? new Float64Array(this.count).fill(-Infinity) : null;
      for (const r of this.shown) {
        // Of several requests in one pixel of a lane, the first is drawn.
        if (lanes) {
          const end = this.x(run.leaves[r]);
          if (end < covered[this.rowOf[r]] + 1) continue;
          covered[this.rowOf[r]] = end;
        }
        this.drawRequest(context, r, this.y(r), Math.max(rowHeight - gap, 1), colours, lanes);
      }
    } else {
      const rows = Math.floor(this.timeline);
      for (let row = 0; row < rows; row++) {
        this.drawRequest(context, this.shown[Math.floor((row + 0.5) * this.count / rows)], row, 1, colours, false);
      }
    }
    const chosen = state.selected;
    if (chosen && chosen.view === this && this.rowOf[chosen.r] >= 0) {
      const y = this.y(chosen.r), height = Math.max(rowHeight, 3);
      context.strokeStyle = colours.selected; context.lineWidth = 2;
      const from = Math.max(this.x(run.arrives[chosen.r]), LEFT - 3);
      context.strokeRect(from, y - 1, Math.min(this.x(run.leaves[chosen.r]), LEFT + this.width + 3) - from, height + 1);
    }
  }

  /** The visible spans of a request; of those narrower than a pixel only what is not covered yet. */
  drawRequest(context, r, y, height, colours, running) {
    const s = this.run.span, low = s.offset[r], high = s.offset[r + 1], { from, to } = this.state;
    const left = running ? this.x(this.run.runsFrom[r]) : 0, wide = this.x(this.run.leaves[r]) - left;
    if (running && wide < 2) {
      // Of a request in a pixel, what it did longest, which the middle mostly is.
      const middle = this.run.spanAt(r, (this.run.runsFrom[r] + this.run.leaves[r]) / 2);
      if (middle < 0) return;
      context.fillStyle = spanColour(this.run, this.state.colour, r, middle, colours);
      context.fillRect(Math.round(left), Math.round(y), Math.max(Math.round(wide), 1), Math.max(Math.round(height), 1));
      return;
    }
    let i = Math.max(lastUpTo(s.from, from, low, high), low), reached = -Infinity;
    for (; i < high && s.from[i] < to; i++) {
      if (running && s.phase[i] === WAITING) continue;
      const x0 = this.x(s.from[i]), x1 = this.x(s.to[i]);
      const short = s.phase[i] === CONTEXT || s.phase[i] === RECOMPUTE || s.phase[i] === PAUSED;
      if (x1 < reached + 0.5 && !short) continue;
      context.fillStyle = spanColour(this.run, this.state.colour, r, i, colours);
      context.fillRect(x0, y, Math.max(x1 - x0, short ? 1 : 0.5), height);
      if ((this.state.colour === "request" || this.state.colour === "class") && short && s.phase[i] !== PAUSED) {
        context.fillStyle = "#0008";
        context.fillRect(x0, y, Math.max(x1 - x0, 1), height);
      }
      reached = x1;
      if (height >= 11 && x1 - x0 > 46) this.drawWords(context, i, x0, x1, y, height, colours);
    }
  }

  drawWords(context, i, x0, x1, y, height, colours) {
    const s = this.run.span, phase = s.phase[i];
    let words;
    if (phase === WAITING) words = this.run.nameOf(this.run.header.causes[s.cause[i]]);
    else if (phase === PAUSED) words = `${this.run.header.paused}${s.cause[i] < 0 ? "" : ` for ${this.run.header.ids[s.cause[i]]}`}`;
    else words = `${grouped(s.tokens[i])} tokens`;
    context.font = `${Math.min(height - 3, 11)}px system-ui, sans-serif`;
    const left = Math.max(x0, LEFT) + 3;
    if (context.measureText(words).width > Math.min(x1, LEFT + this.width) - left - 3) return;
    context.textAlign = "left"; context.textBaseline = "middle";
    context.fillStyle = phase === CONTEXT || phase === RECOMPUTE ? "#fff" : phase === WAITING ? colours.ink : "#1c2127";
    context.fillText(words, left, y + height / 2 + 0.5);
  }

  /** A mark for each pause, and while there are few of them an arrow to the request that it made room for. */
  drawPauses(context, colours) {
    const { run, state } = this, visible = run.pauses.filter(pause => pause.time >= state.from && pause.time <= state.to);
    const arrows = state.arrows && visible.length <= MAX_ARROWS;
    for (const pause of visible) {
      if (this.rowOf[pause.victim] < 0) continue;
      const x = this.x(pause.time), half = Math.max(this.rowHeight, 2) / 2, y = this.y(pause.victim) + half;
      context.fillStyle = colours.selected;
      if (this.rowHeight < 4) { context.fillRect(x - 1, y - 1, 2.5, 2.5); }
      else {
        context.beginPath(); context.moveTo(x, y - 4); context.lineTo(x + 6, y); context.lineTo(x, y + 4); context.fill();
      }
      if (!arrows || this.rowOf[pause.beneficiary] < 0 || pause.victim === pause.beneficiary) continue;
      const end = this.y(pause.beneficiary) + half, down = end > y, bend = Math.min(30, 8 + Math.abs(end - y) * 0.15);
      context.strokeStyle = colours.selected; context.lineWidth = 1.2; context.globalAlpha = 0.8;
      context.beginPath(); context.moveTo(x, y); context.quadraticCurveTo(x - bend, (y + end) / 2, x, end); context.stroke();
      context.globalAlpha = 1;
      context.beginPath(); context.moveTo(x, end); context.lineTo(x - 5, end + (down ? -7 : 7)); context.lineTo(x + 2, end + (down ? -7 : 7)); context.fill();
    }
  }

  drawDivergence(context, colours, top, bottom) {
    const time = this.state.divergence && this.state.divergence[this.place];
    if (time === null || time === undefined) return;
    const x = this.x(time);
    if (x < LEFT || x > LEFT + this.width) return;
    context.strokeStyle = colours.limit; context.lineWidth = 1.5; context.setLineDash([6, 4]);
    context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke();
    context.setLineDash([]);
    if (top === 0) {
      context.font = "11px system-ui, sans-serif"; context.textAlign = "left"; context.textBaseline = "top";
      label(context, `first different decision: iteration ${grouped(this.state.divergence.iteration)}`, x + 5, 3, colours.limit, colours);
    }
  }

  drawNames(context, colours) {
    context.font = "11px system-ui, sans-serif"; context.textAlign = "right"; context.textBaseline = "middle";
    context.fillStyle = colours.muted;
    if (this.state.rows === "lanes") {
      context.fillText(`${grouped(this.count)} lanes`, LEFT - 8, 8);
      return;
    }
    const every = roundStep(Math.max(1, (this.rowHeight >= MIN_NAMED_ROW ? 12 : 54) / this.rowHeight));
    for (let row = 0; row < this.shown.length; row += every) {
      const id = this.run.header.ids[this.shown[row]];
      context.fillText(id.length > 10 ? `…${id.slice(-9)}` : id, LEFT - 8, Math.max((row + 0.5) * this.rowHeight + 1, 7));
    }
    if (this.rowHeight < 1) {
      context.textAlign = "left"; context.textBaseline = "top";
      label(context, `${grouped(this.shown.length)} requests; one of every ${Math.round(this.count / this.timeline)} is drawn: zoom in to see each`, LEFT + 6, this.timeline - 16, colours.muted, colours);
    }
  }

  /** The request and its span at a point of the canvas; null beside the rows. */
  hit(x, y) {
    if (y < 0 || y >= this.timeline || x < LEFT) return null;
    this.layout();
    const time = this.time(x), row = Math.floor(y / this.rowHeight);
    if (this.state.rows === "lanes") {
      const r = this.shown.find(one => this.rowOf[one] === row && this.run.runsFrom[one] <= time && this.run.leaves[one] >= time);
      return r === undefined ? null : { r, i: this.run.spanAt(r, time), time };
    }
    const r = this.shown[row];
    return r === undefined ? null : { r, i: this.run.spanAt(r, time), time };
  }

  listen() {
    const { canvas, state } = this;
    let from = null;
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) state.move(event.deltaX / this.width);
      else state.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      from = { x: event.offsetX, y: event.offsetY, from: state.from, to: state.to, range: event.shiftKey };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      state.cursor = this.time(event.offsetX);
      if (from && from.range) {
        state.range = { view: this, from: Math.min(from.x, event.offsetX), to: Math.max(from.x, event.offsetX) };
      } else if (from && Math.abs(event.offsetX - from.x) > CLICK) {
        const shift = (from.x - event.offsetX) / this.width * (from.to - from.from);
        state.show(from.from + shift, from.to + shift);
      }
      state.hover(this, event.offsetX, event.offsetY, event.clientX, event.clientY);
      state.redraw();
    });
    canvas.addEventListener("pointerup", event => {
      const range = state.range;
      state.range = null;
      if (range && range.to - range.from > CLICK) state.show(this.time(range.from), this.time(range.to));
      else if (from && Math.abs(event.offsetX - from.x) <= CLICK && Math.abs(event.offsetY - from.y) <= CLICK) {
        const found = this.hit(event.offsetX, event.offsetY);
        state.select(found ? { view: this, r: found.r } : null);
      }
      from = null;
      state.redraw();
    });
    canvas.addEventListener("pointerleave", () => { state.cursor = null; state.hover(null); state.redraw(); });
    canvas.addEventListener("keydown", event => this.key_(event));
  }

  key_(event) {
    const { state } = this, selected = state.selected && state.selected.view === this ? this.rowOf[state.selected.r] : -1;
    const middle = (state.from + state.to) / 2, byRow = state.rows !== "lanes";
    const actions = {
      ArrowLeft: () => state.move(-0.15), ArrowRight: () => state.move(0.15),
      "+": () => state.zoom(0.6, middle), "=": () => state.zoom(0.6, middle), "-": () => state.zoom(1 / 0.6, middle),
      Home: () => state.showAll(), Escape: () => state.select(null),
      ArrowDown: () => byRow && this.shown.length && state.select({ view: this, r: this.shown[Math.min(selected + 1, this.shown.length - 1)] }),
      ArrowUp: () => byRow && this.shown.length && state.select({ view: this, r: this.shown[Math.max(selected - 1, 0)] }),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }
}
