// The page of a run without iterations: one sentence.

const { name, settings, sentence } = JSON.parse(document.getElementById("data").textContent);
document.getElementById("headings").append(element("h1", {}, name), element("p", { class: "settings" }, settings));
document.getElementById("sentence").textContent = sentence;
onTheme(() => {});
