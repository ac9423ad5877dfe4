// Evaluations: the figures of each, and two of them side by side, prompt by prompt.

import { Missing, get } from "slime/api.js";
import { chart } from "slime/chart.js";
import { badge, card, h, link, notice, number, replace, rewardColour, table } from "slime/dom.js";

export const watch = (run) => [["run", run.key, "evaluations"]];
const FIGURES = /^(reward|mean@\d+|pass@\d+|truncated_ratio|response_len\/mean|reward_missing_count)$/;

export async function show(place, run, name, before, after) {
  const values = await get("run", run.key, "evaluations");
  const names = [...new Set([...Object.keys(values.sets), ...Object.keys(values.texts)])];
  if (!names.length) return place.append(notice("This run has no evaluation: --eval-prompt-data and --eval-interval make them."));
  for (const one of names) if (values.sets[one]) place.append(figures(run, one, values.sets[one]));
  const mine = name ?? Object.keys(values.texts)[0];
  if (mine === undefined) return place.append(notice("The texts of evaluations were not recorded (--log-samples)."));
  const steps = values.texts[mine] ?? [];
  await sideBySide(place, run, Object.keys(values.texts), mine, steps, +(before ?? steps[0]), +(after ?? steps.at(-1)));
}

function figures(run, name, entries) {
  const keys = [...new Set(entries.flatMap((entry) => Object.keys(entry.figures)))].filter((key) => FIGURES.test(key));
  const curves = keys.filter((key) => key === "reward" || key.startsWith("pass@")).slice(0, 5).map((key, i) => ({
    label: key, colour: `--c${i + 1}`, x: entries.map((entry) => entry.step), y: entries.map((entry) => entry.figures[key] ?? null),
  }));
  return card(`Evaluation ${name}`, h("div", { class: "columns uneven" }, chart(curves, { title: "by step" }),
    table([{ name: "at step", value: (e) => e.step }, ...keys.map((key) => ({ name: key, value: (e) => e.figures[key] ?? null }))], entries, { id: "figures" })));
}

async function sideBySide(place, run, names, name, steps, before, after) {
  const to = (n, a, b) => { location.hash = link("evaluations", run.key, n, a, b); };
  const choice = (id, value, options, change) => h("select", { id, onchange: (event) => change(event.target.value) }, options.map((option) => h("option", { value: option, selected: option === value }, option)));
  const section = card("Side by side", h("div", { class: "controls" },
    names.length > 1 ? choice("set", name, names, (next) => { location.hash = link("evaluations", run.key, next); }) : null,
    h("label", {}, "step ", choice("first", before, steps, (next) => to(name, next, after))), h("label", {}, "against ", choice("second", after, steps, (next) => to(name, before, next)))));
  place.append(section);
  let values;
  try {
    values = await get("run", run.key, "evaluation", name, before, after);
  } catch (error) {
    if (!(error instanceof Missing)) throw error;
    return section.append(notice(error.message));
  }
  const rewards = values.rows.flatMap((row) => [...row.before.samples, ...row.after.samples].map((sample) => sample[1])).filter((reward) => reward !== null);
  const low = Math.min(...rewards, 0), high = Math.max(...rewards, 1);
  const pair = h("div", { class: "columns", id: "pair" });
  const chips = (row, side, at) => h("span", { class: "chips" }, row[side].samples.map(([position, reward, length, status]) =>
    h("a", { class: "chip " + (status === "completed" ? "" : "open"), style: `--chip: ${rewardColour(reward, low, high)}`, href: link("sample", run.key, `eval-${name}`, at, position), title: `reward ${number(reward)}, ${length} tokens, ${status}`, "aria-label": `reward ${number(reward)}` })));
  section.append(table([
    { name: "prompt", left: true, value: (r) => r.head, show: (r) => h("button", { type: "button", class: "link cut", onclick: () => both(pair, run, name, values.steps, r) }, r.head || "(empty)") },
    { name: "label", left: true, value: (r) => r.label, show: (r) => h("span", { class: "cut short" }, r.label) },
    { name: `at ${before}`, left: true, value: (r) => r.before.reward, show: (r) => chips(r, "before", before) }, { name: "before", value: (r) => r.before.reward },
    { name: `at ${after}`, left: true, value: (r) => r.after.reward, show: (r) => chips(r, "after", after) }, { name: "after", value: (r) => r.after.reward },
    { name: "change", value: (r) => (r.before.reward === null || r.after.reward === null ? null : r.after.reward - r.before.reward) },
  ], values.rows, { id: "compared", order: "change" }), h("p", { class: "muted" }, "A click on a prompt shows its first responses here, a coloured box its sample."), pair);
}

async function both(place, run, name, steps, row) {
  const side = async (which, at) => {
    const first = row[which].samples[0];
    if (!first) return card(`at ${at}`, notice("not in this evaluation"));
    try {
      const found = await get("run", run.key, "sample", `eval-${name}`, at, first[0]);
      return card(`at ${at}`, h("div", { class: "text" }, found.record.response || "(empty)"), h("p", {}, "reward ", number(found.row.reward), " ", badge(found.record.status, found.record.status)));
    } catch (error) {
      return card(`at ${at}`, notice(error.message));
    }
  };
  replace(place, await side("before", steps[0]), await side("after", steps[1]));
  place.scrollIntoView({ block: "nearest" });
}
