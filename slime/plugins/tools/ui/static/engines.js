// Load and health of the engines, and the ends of all logs.

import { get } from "slime/api.js";
import { COLOURS, chart } from "slime/chart.js";
import { panel } from "slime/curves.js";
import { badge, card, facts, h, link, notice, number, percent, seconds, table } from "slime/dom.js";

export const watch = (run) => [["run", run.key, "engines"]];

export async function show(place, run) {
  const values = await get("run", run.key, "engines");
  const bad = Object.entries(values.totals);
  place.append(card("Health over the whole run", bad.length ? facts(bad.map(([name, total]) => [name.replace(/^(rollout|perf)\//, "").replaceAll("_", " ").replace(" count", ""), h("span", { class: total ? "warn" : "" }, number(total))])) : notice("No step has been trained yet.")),
    ...loads(values.loads),
    await panel([run.key], values.metrics.filter((name) => !name.endsWith("_count") || values.totals[name]), { onpick: (x) => { location.hash = link("step", run.key, x); } }),
    card("Logs", values.logs.length ? values.logs.map((log) => h("details", { open: log.name.startsWith("engine") && log.bytes > 0 && values.logs.length < 6 },
      h("summary", {}, log.name, h("span", { class: "muted" }, ` ${number(log.bytes)} bytes`)),
      log.lines.length ? h("pre", { class: "log" }, log.lines.join("\n")) : h("p", { class: "muted" }, "empty"))) : notice("The run has no logs.")));
}

const MOST_CURVES = COLOURS.length;

// Each engine over the run: its requests, and when its state changed.
function loads(engines) {
  if (!engines.length) return [card("Load of each engine", notice("This run has no engines.jsonl: it was made by an older release, or it has no engines."))];
  const drawn = engines.slice(0, MOST_CURVES);
  const curves = (name) => drawn.map((one, i) => ({ label: one.name, colour: COLOURS[i], x: one.times, y: one[name] }));
  const plot = (name, title) => chart(curves(name), { title, xLabel: "time", xText: (x) => seconds(x), sync: "x-time" });
  const changes = engines.flatMap((one) => one.changes.slice(1).map(([moment, state]) => [moment, one.name, state])).sort((a, b) => a[0] - b[0]);
  return [
    card("Load of each engine", table([
      { name: "engine", left: true, value: (e) => e.name },
      { name: "state", left: true, value: (e) => e.state, show: (e) => badge(e.state, e.state) },
      { name: "busy", value: (e) => e.busy, show: (e) => percent(e.busy), title: "share of the measured moments at which it ran a request" },
      { name: "most running", value: (e) => Math.max(0, ...e.running.filter((x) => x !== null)) },
      { name: "most waiting", value: (e) => Math.max(0, ...e.waiting.filter((x) => x !== null)) },
      { name: "no answer", value: (e) => e.silent, title: "how often it did not say its load", show: (e) => h("span", { class: e.silent ? "warn" : "" }, `${number(e.silent)} of ${number(e.asked)}`) },
    ], engines, { id: "loads" }),
    changes.length ? h("details", {}, h("summary", {}, `Changes of state: ${changes.length}`),
      h("ul", { class: "notes" }, changes.map(([moment, name, state]) => h("li", {}, `${seconds(Math.max(moment, 0))}: ${name} is ${state}`)))) : null),
    h("div", { class: "grid" }, plot("running", "running requests"), plot("waiting", "waiting requests"), plot("tokens", "tokens in the KV cache")),
    engines.length > MOST_CURVES ? h("p", { class: "muted" }, `The curves are those of the first ${MOST_CURVES} engines.`) : "",
  ];
}
