// The page of a fleet: its figures, its replicas in a table and in lanes, and the requests that were slow or failed.

const page = JSON.parse(document.getElementById("data").textContent), run = { header: page, label: page.name };
const where = one => (one.decode_replica === null || one.decode_replica === undefined ? (one.replica ?? one.prefill_replica ?? "–") : `${one.prefill_replica ?? "–"} → ${one.decode_replica}`);
onTheme(() => {});
showHeadings([run]);
document.getElementById("summary").append(tilesOf([run]), ...page.findings.map(text => element("p", { class: "advice" }, text)),
  ...page.sentences.map(text => element("p", { class: "note" }, text)));
document.getElementById("replicas").append(element("h2", {}, "Replicas"),
  table("Each replica has a run directory, and a page of its own with `ifbbench plot --html`", ["Replica", "Requests", "Queue time p99", "TTFT p50", "TTFT p99", "TPOT p50", "Output tokens/s", "Hit rate", "KV peak"],
    page.replicas.map(one => [`${one.replica} ${one.side || ""}`.trim(), grouped(one.requests.total), inWords(one.queue_time_s.p99, "time"), inWords(one.ttft_s.p50, "time"),
      inWords(one.ttft_s.p99, "time"), inWords(one.tpot_s.p50, "time"), inWords(one.output_throughput_tokens_per_s, ""), inWords(one.prefix_hit_rate, "share"),
      one.kv_blocks.max ? percent(one.kv_blocks.peak_used / one.kv_blocks.max) : "–"]), [1, 2, 3, 4, 5, 6, 7, 8]));
if (page.pages.length) document.getElementById("replicas").append(element("p", { class: "note" }, ...page.pages.flatMap(path => [element("a", { href: path }, path), " "])));
for (const chart of page.charts) {
  document.getElementById("charts").append(element("figure", { style: "margin:0 0 18px" },
    element("img", { src: `data:image/svg+xml;base64,${chart.svg}`, alt: chart.shows, title: chart.shows, style: "display:block;width:100%;max-width:1100px;background:#fff;border-radius:5px" })));
}
document.getElementById("slowest").append(element("h2", {}, "Slowest requests"),
  table("Completed requests of the longest end-to-end latency, and the part of it that took longest", ["Request", "Replica", "E2E", "TTFT", "Most of it", "Share"],
    page.slowest.map(one => [one.request_id, where(one), inUnit(one.e2e_s), inUnit(one.ttft_s), one.cause, percent(one.share)]), [1, 2, 3, 5]));
if (page.failed.length) {
  document.getElementById("failed").append(element("h2", {}, "Failed requests"),
    table(`The first ${page.failed.length} of ${grouped(page.summary.requests.failed)}`, ["Request", "Replica", "Arrival", "Error"],
      page.failed.map(one => [one.request_id, where(one), inUnit(one.arrival_s), one.error]), [1, 2]));
}
document.getElementById("config").append(element("h2", {}, "Settings"),
  table("", ["Setting", "Value"], Object.entries(page.config).filter(([, value]) => value !== null).map(([name, value]) => [name, JSON.stringify(value)])));
document.documentElement.dataset.readyMs = Math.round(performance.now());
