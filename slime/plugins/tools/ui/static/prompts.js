// The prompts of a run, and all samples of one of them.

import { get } from "slime/api.js";
import { chart } from "slime/chart.js";
import { badge, card, h, link, notice, number, replace, rewardColour, table } from "slime/dom.js";

export const watch = (run) => [["run", run.key, "prompts"]];
const find = { text: "" };

export async function show(place, run) {
  const values = await get("run", run.key, "prompts");
  if (!values.prompts.length) return place.append(notice("No samples were recorded (--log-samples), or they are not indexed yet."));
  const holder = h("div", {});
  const columns = [
    { name: "prompt", left: true, value: (p) => p.head, show: (p) => h("a", { class: "cut", href: link("prompt", run.key, p.key) }, p.head || "(empty)") },
    { name: "label", left: true, value: (p) => p.label, show: (p) => h("span", { class: "cut short" }, p.label) },
    { name: "samples", value: (p) => p.n },
    { name: "steps", value: (p) => p.steps, title: "number of steps that had this prompt" },
    { name: "first", value: (p) => p.before, title: "mean reward in the first of these steps", show: (p) => swatch(p.before) },
    { name: "last", value: (p) => p.after, title: "mean reward in the last of these steps", show: (p) => swatch(p.after) },
    { name: "change", value: (p) => (p.steps < 2 || p.before === null || p.after === null ? null : p.after - p.before) },
    { name: "length", value: (p) => p.length_after, show: (p) => `${number(p.length_before, 0)} → ${number(p.length_after, 0)}` },
  ];
  const draw = () => replace(holder, table(columns, values.prompts.filter((p) => `${p.head} ${p.label}`.toLowerCase().includes(find.text.toLowerCase())), { id: "prompts" }));
  place.append(card("Prompts",
    h("div", { class: "controls" },
      h("input", { type: "search", id: "find-prompt", placeholder: "find a prompt", value: find.text, oninput: (event) => { find.text = event.target.value; draw(); } }),
      h("span", { class: "muted" }, `${values.prompts.length} of ${number(values.total)} prompts, the most frequent first`)), holder));
  draw();
}

const swatch = (reward) => h("span", {}, h("i", { class: "swatch", style: `background: ${rewardColour(reward, 0, 1)}` }), number(reward));

export const one = { watch: (run, key) => [["run", run.key, "prompt", key]], show: showOne };

async function showOne(place, run, key) {
  const values = await get("run", run.key, "prompt", key);
  const trained = values.samples.filter((row) => row.kind === "rollout");
  const rewards = values.samples.map((row) => row.reward).filter((reward) => reward !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards);
  place.append(h("div", { class: "controls" }, h("a", { class: "button", href: link("prompts", run.key) }, "← prompts")),
    card(null, h("p", { class: "head" }, values.head), h("p", { class: "muted" }, "label ", values.label, ` · ${number(values.total)} samples`)));
  if (trained.length) place.append(h("div", { class: "grid" }, curve(run, trained, "reward", "Mean reward by step"), curve(run, trained, "length", "Mean response length by step")));
  place.append(card("Samples", table([
    { name: "step", value: (r) => r.step, show: (r) => (r.kind === "rollout" ? number(r.step) : `${r.kind.replace("eval-", "eval ")} ${r.step}`) },
    { name: "sample", value: (r) => r.sample_index ?? r.position, show: (r) => h("a", { href: link("sample", run.key, r.kind, r.step, r.position) }, number(r.sample_index ?? r.position)) },
    { name: "reward", value: (r) => r.reward, show: (r) => h("span", {}, h("i", { class: "swatch", style: `background: ${rewardColour(r.reward, low, high)}` }), number(r.reward)) },
    { name: "length", value: (r) => r.length }, { name: "staleness", value: (r) => r.staleness },
    { name: "status", left: true, value: (r) => r.status, show: (r) => badge(r.status, r.status) },
    { name: "response", left: true, value: (r) => r.response, show: (r) => h("a", { class: "cut wide", href: link("sample", run.key, r.kind, r.step, r.position) }, r.response ?? "…") },
  ], values.samples, { id: "samples", order: "step" })));
}

function curve(run, rows, name, title) {
  const byStep = new Map();
  for (const row of rows) if (row[name] !== null) byStep.set(row.step, [...(byStep.get(row.step) ?? []), row[name]]);
  const x = [...byStep.keys()].sort((a, b) => a - b);
  const y = x.map((at) => byStep.get(at).reduce((sum, value) => sum + value, 0) / byStep.get(at).length);
  return chart([{ label: name, colour: "--c1", x, y }], { title, onpick: (at) => { location.hash = link("step", run.key, at); } });
}
