// Load and health of the engines, and the ends of all logs.

import { get } from "slime/api.js";
import { panel } from "slime/curves.js";
import { card, facts, h, link, notice, number } from "slime/dom.js";

export const watch = (run) => [["run", run.key, "engines"]];

export async function show(place, run) {
  const values = await get("run", run.key, "engines");
  const bad = Object.entries(values.totals);
  place.append(card("Health over the whole run", bad.length ? facts(bad.map(([name, total]) => [name.replace("rollout/", "").replaceAll("_", " ").replace(" count", ""), h("span", { class: total ? "warn" : "" }, number(total))])) : notice("No step has been trained yet.")),
    await panel([run.key], values.metrics.filter((name) => !name.endsWith("_count") || values.totals[name]), { onpick: (x) => { location.hash = link("step", run.key, x); } }),
    card("Logs", values.logs.length ? values.logs.map((log) => h("details", { open: log.name.startsWith("engine") && log.bytes > 0 && values.logs.length < 6 },
      h("summary", {}, log.name, h("span", { class: "muted" }, ` ${number(log.bytes)} bytes`)),
      log.lines.length ? h("pre", { class: "log" }, log.lines.join("\n")) : h("p", { class: "muted" }, "empty"))) : notice("The run has no logs.")));
}
