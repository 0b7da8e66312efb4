// The page of a run against an endpoint: its figures, charts, and the requests that were slow or failed.

const page = JSON.parse(document.getElementById("data").textContent), run = { header: page, label: page.name };
onTheme(() => {});
showHeadings([run]);
document.getElementById("summary").append(tilesOf([run]), element("p", { class: "advice" }, page.findings),
  ...page.warnings.map(text => element("p", { class: "note" }, text)));
for (const chart of page.charts) {
  document.getElementById("charts").append(element("figure", { style: "margin:0 0 18px" },
    element("img", { src: `data:image/svg+xml;base64,${chart.svg}`, alt: chart.shows, title: chart.shows, style: "display:block;width:100%;max-width:1100px;background:#fff;border-radius:5px" })));
}
document.getElementById("slowest").append(element("h2", {}, "Slowest requests"),
  table("Completed requests of the longest end-to-end latency, and the part of it that took longest", ["Request", "E2E", "TTFT", "Most of it", "Share"],
    page.slowest.map(one => [one.request_id, inUnit(one.e2e_s), inUnit(one.ttft_s), one.cause, percent(one.share)]), [1, 2, 4]));
if (page.failed.length) {
  document.getElementById("failed").append(element("h2", {}, "Failed requests"),
    table(`The first ${page.failed.length} of ${grouped(page.summary.requests.failed)}`, ["Request", "Arrival", "Kind", "Error"],
      page.failed.map(one => [one.request_id, inUnit(one.arrival_s), one.kind, one.error]), [1]));
}
if (page.what_if) showWhatIf([run]);
document.getElementById("config").append(element("h2", {}, "Settings of the client"),
  table("", ["Setting", "Value"], Object.entries(page.config).map(([name, value]) => [name, JSON.stringify(value)])));
document.documentElement.dataset.readyMs = Math.round(performance.now());
