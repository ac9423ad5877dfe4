// What became of each group of prompts.

import { get } from "slime/api.js";
import { badge, card, facts, h, link, notice, number, s, table } from "slime/dom.js";

export const watch = (run) => [["run", run.key, "ledger"]];
const COLOUR = { trained: "--good", filtered: "--c2", replaced: "--c3", "left out": "--c4", discarded: "--c5", lost: "--bad" };

export async function show(place, run) {
  const values = await get("run", run.key, "ledger");
  if (values.missing) return place.append(notice(values.missing));
  const states = [...new Set([...Object.keys(values.counts), ...values.steps.flatMap(([, counts]) => Object.keys(counts))])];
  const total = Object.values(values.counts).reduce((sum, n) => sum + n, 0);
  place.append(
    h("div", { class: "columns" },
      card("Groups", facts([...Object.entries(values.counts).map(([state, n]) => [state, `${number(n)} (${((100 * n) / total).toFixed(1)}%)`]),
        ["ahead of training", values.ahead.length], ["open", values.open.length], ["snapshot after step", values.snapshot], ["rows after it", values.beyond || null], ["resumes", values.rolled_back.length || null]]),
      h("p", { id: "balance" }, values.problems.length ? badge("inconsistent", "failed") : badge("consistent", "completed"), values.problems.length ? "" : " Every group that was supplied is closed, ahead or open, exactly once."),
      values.problems.length ? h("ul", {}, values.problems.slice(0, 50).map((problem) => h("li", {}, problem))) : null),
      card("By step", bars(run, values.steps, states))),
    h("div", { class: "columns" },
      card("Why groups were not trained", Object.keys(values.reasons).length ? table([{ name: "reason", left: true, value: (r) => r[0], show: (r) => r[0] }, { name: "groups", value: (r) => r[1] }], Object.entries(values.reasons)) : h("p", { class: "muted" }, "No group was dropped for a reason.")),
      card("Weight versions of trained groups", table([{ name: "versions", left: true, value: (r) => r[0], show: (r) => r[0] || "–" }, { name: "groups", value: (r) => r[1] }], Object.entries(values.versions)))),
    waiting("Open groups", values.open), waiting("Groups ahead of training", values.ahead));
}

function bars(run, steps, states) {
  const last = steps.slice(-120);
  const most = Math.max(...last.map(([, counts]) => Object.values(counts).reduce((sum, n) => sum + n, 0)), 1);
  const width = Math.max(3, Math.min(28, 700 / Math.max(last.length, 1)));
  const marks = last.map(([step, counts], i) => {
    let y = 120;
    return s("a", { href: link("step", run.key, step) }, s("title", {}, `step ${step}: ${Object.entries(counts).map(([state, n]) => `${n} ${state}`).join(", ")}`),
      states.map((state) => {
        const height = (110 * (counts[state] ?? 0)) / most;
        y -= height;
        return height ? s("rect", { x: i * width, y, width: width - 1, height, style: `fill: var(${COLOUR[state] ?? "--c6"})` }) : null;
      }));
  });
  return h("div", {}, h("span", { class: "legend" }, states.map((state) => h("span", {}, h("i", { style: `background: var(${COLOUR[state] ?? "--c6"})` }), state))),
    h("div", { class: "scroll" }, s("svg", { width: Math.max(last.length * width, 40), height: 122, role: "img", "aria-label": "groups by step and outcome" }, marks)),
    steps.length > last.length ? h("p", { class: "muted" }, `the last ${last.length} of ${steps.length} steps`) : null);
}

const waiting = (title, rows) => (rows.length ? card(title, table([
  { name: "group", value: (r) => r.group }, { name: "state", left: true, value: (r) => r.state, show: (r) => r.state ?? "–" }, { name: "asked in", value: (r) => r.asked }, { name: "samples", value: (r) => r.samples },
  { name: "tokens", value: (r) => r.tokens ?? 0 }, { name: "returns", value: (r) => r.returns ?? 0 },
], rows)) : h("span", {}));
