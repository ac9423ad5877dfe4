// The metrics of one run, or of several side by side.

import { get } from "slime/api.js";
import { COLOURS, chart } from "slime/chart.js";
import { h, link, notice, number, replace, seconds } from "slime/dom.js";

const GROUPS = ["eval", "rollout", "train", "perf", "passrate", "multi_turn"];
const chosen = { runs: new Set(), weight: 0.6, axis: "step", find: "", open: new Set(["eval", "rollout", "train"]) };

export const watch = (run) => [["run", run.key, "overview"], ...others(run).map((key) => ["run", key, "overview"])];

const others = (run) => [...chosen.runs].filter((key) => key !== run.key);

export async function show(place, run) {
  const all = (await get("runs")).runs;
  const names = (await Promise.all([run.key, ...others(run)].map((key) => get("run", key, "overview")))).flatMap((one) => one.names);
  const drawn = h("div", {});
  const redraw = () => panels(drawn, run, [...new Set(names)]);
  const again = () => { replace(place); show(place, run); };
  place.append(h("div", { class: "controls" },
    h("label", {}, "smoothing ", h("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: chosen.weight,
      onchange: (event) => { chosen.weight = +event.target.value; redraw(); } })),
    h("label", {}, "against ", h("select", { id: "axis", onchange: (event) => { chosen.axis = event.target.value; redraw(); } },
      ["step", "time"].map((axis) => h("option", { value: axis, selected: axis === chosen.axis }, axis)))),
    h("label", {}, h("input", { type: "search", id: "find", placeholder: "find a metric", value: chosen.find,
      oninput: (event) => { chosen.find = event.target.value; redraw(); } })),
    all.length > 1 ? h("fieldset", {}, h("legend", {}, "compare with"), all.filter((one) => one.key !== run.key).slice(0, 30).map((one) =>
      h("label", {}, h("input", { type: "checkbox", name: "compare", value: one.key, checked: chosen.runs.has(one.key), onchange: (event) => {
        if (event.target.checked) chosen.runs.add(one.key); else chosen.runs.delete(one.key);
        again();
      } }), one.key))) : null), drawn);
  await redraw();
}

async function panels(place, run, names) {
  const find = chosen.find.toLowerCase();
  const found = names.filter((name) => name.toLowerCase().includes(find)).sort();
  const groups = [...new Set([...GROUPS, ...found.map((name) => name.split("/")[0])])];
  const parts = await Promise.all(groups.map(async (group) => {
    const mine = found.filter((name) => name.split("/")[0] === group);
    if (!mine.length) return null;
    const open = find ? mine.length < 40 : chosen.open.has(group);
    const body = h("div", {});
    const fill = async () => { if (!body.firstChild) body.append(await panel([run.key, ...others(run)], mine, options(run))); };
    if (open) await fill();
    return h("details", { open, ontoggle: (event) => {
      if (event.target.open) { chosen.open.add(group); fill(); } else if (!find) chosen.open.delete(group);
    } }, h("summary", {}, group, h("span", { class: "muted" }, ` ${mine.length}`)), body);
  }));
  replace(place, found.length ? parts : notice("No metric has this in its name."));
}

const options = (run) => ({ weight: chosen.weight, axis: chosen.axis, onpick: chosen.axis === "step" ? (x) => { location.hash = link("step", run.key, x); } : null });

// A grid of charts, one per metric, with the same metric of each run.
export async function panel(keys, names, { weight = 0, axis = "step", onpick = null } = {}) {
  const has = await Promise.all(keys.map(async (key) => new Set((await get("run", key, "overview")).names)));
  const charts = await Promise.all(names.map(async (name) => {
    const found = await Promise.all(keys.map((key, i) => (has[i].has(name) ? get("run", key, "series", name) : null)));
    const curves = found.map((curve, i) => curve && {
      label: keys.length > 1 ? keys[i] : "value", colour: COLOURS[i % COLOURS.length],
      x: axis === "step" ? curve.steps : curve.times, y: curve.values,
    }).filter(Boolean);
    const joined = found.some((curve) => curve && curve.count > curve.values.length);
    return chart(curves, { title: name + (joined ? " (means of neighbouring steps)" : ""), weight: name.startsWith("eval/") ? 0 : weight, sync: "x-" + axis, onpick, xLabel: axis,
      xText: axis === "time" ? (x) => seconds(x) : (x) => number(x) });
  }));
  return h("div", { class: "grid" }, charts);
}
