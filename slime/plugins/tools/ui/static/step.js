// A step: its time line, and its groups of samples as a table.

import { Missing, get, isExport } from "slime/api.js";
import { badge, card, h, link, notice, number, replace, rewardColour, table } from "slime/dom.js";
import { drawTimeline } from "slime/timeline.js";

const filter = { text: "", state: "", status: "", low: "", high: "" };
const order = { name: null, down: false };

// The trace is complete only after the step's metrics. An exported file does not change, and may lack it.
export const watch = (run, at) => (at === undefined ? [["run", run.key, "steps"]]
  : [["run", run.key, "step", at], ...(isExport() ? [] : [["run", run.key, "timeline", at]])]);

export async function show(place, run, at) {
  const known = await get("run", run.key, "steps");
  const number_ = at === undefined ? known.steps.at(-1) ?? known.last : +at;
  if (number_ === undefined || number_ < 0) return place.append(notice("No step has been trained yet."));
  place.append(picker(run, known, number_));
  let values;
  try {
    values = await get("run", run.key, "step", number_);
  } catch (error) {
    if (!(error instanceof Missing)) throw error;
    return place.append(notice(error.message));
  }
  place.append(await timeline(run, number_), groups(run, values), metrics(values));
}

function picker(run, known, at) {
  const steps = known.steps;
  const to = (n) => { location.hash = link("step", run.key, n); };
  const before = steps.filter((one) => one < at).at(-1);
  const after = steps.find((one) => one > at);
  return h("div", { class: "controls" },
    h("button", { type: "button", id: "before", disabled: before === undefined, onclick: () => to(before) }, "←"),
    h("label", {}, "step ", h("input", { type: "number", id: "step", min: 0, value: at, onchange: (event) => to(event.target.value) })),
    h("button", { type: "button", id: "after", disabled: after === undefined, onclick: () => to(after) }, "→"),
    h("span", { class: "muted" }, steps.length ? `samples of ${steps.length} steps, ${steps[0]} to ${steps.at(-1)}` : "no samples were recorded (--log-samples)"));
}

async function timeline(run, at) {
  try {
    const values = await get("run", run.key, "timeline", at);
    return card("Time line", values.missing ? notice(values.missing) : drawTimeline(values, run));
  } catch (error) {
    if (!(error instanceof Missing)) throw error;
    return card("Time line", notice(error.message));
  }
}

function groups(run, values) {
  const all = values.groups;
  const rewards = all.flatMap((group) => group.samples.map((row) => row[2])).filter((reward) => reward !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards);
  const states = [...new Set(all.map((group) => group.state).filter(Boolean))];
  const statuses = [...new Set(all.flatMap((group) => Object.keys(group.statuses)))];
  const rewardNames = [...new Set(all.flatMap((group) => Object.keys(group.rewards)))].sort();
  const holder = h("div", {});
  const columns = [
    { name: "group", value: (g) => g.group },
    ...(all.some((group) => group.source) ? [{ name: "data set", left: true, value: (g) => g.source }] : []),
    { name: "prompt", left: true, value: (g) => g.head, show: (g) => g.prompt ? h("a", { href: link("prompt", run.key, g.prompt), class: "cut" }, g.head || "(empty)") : h("span", { class: "muted" }, g.state === "trained" ? "texts not recorded" : "texts of untrained groups are not kept") },
    { name: "samples", left: true, value: (g) => g.n, show: (g) => chips(run, values.step, g, low, high) },
    { name: "reward", value: (g) => g.reward },
    ...rewardNames.map((name) => ({ name, value: (g) => g.rewards[name], title: "one of several rewards" })),
    { name: "± std", value: (g) => g.reward_std },
    { name: "length", value: (g) => g.length, show: (g) => number(g.length, 1) },
    { name: "longest", value: (g) => g.longest },
    { name: "staleness", value: (g) => g.staleness, title: "steps since the oldest weights that sampled a token" },
    { name: "status", left: true, value: (g) => Object.keys(g.statuses).join(), show: (g) => Object.entries(g.statuses).map(([name, n]) => [badge(`${n} ${name}`, name), " "]) },
    { name: "outcome", left: true, value: (g) => `${g.state ?? ""} ${g.reason ?? ""}`, title: "of the ledger, with the verdict of the filter", show: (g) => g.state ? [badge(g.state, g.state), g.reason ? h("span", { class: "muted" }, " ", g.reason) : ""] : "–" },
  ];
  const draw = () => {
    const rows = all.filter(matches);
    replace(holder, h("p", { class: "muted", id: "count" }, `${rows.length} of ${all.length} groups`),
      table(columns, rows, { id: "groups", order: order.name, down: order.down, onorder: (name, down) => Object.assign(order, { name, down }) }));
  };
  const field = (name, element) => { element.addEventListener("input", () => { filter[name] = element.value; draw(); }); element.value = filter[name]; return element; };
  const choice = (name, texts) => field(name, h("select", { id: "filter-" + name }, h("option", { value: "" }, "any " + name), texts.map((text) => h("option", { value: text }, text))));
  if (filter.state && !states.includes(filter.state)) filter.state = "";
  if (filter.status && !statuses.includes(filter.status)) filter.status = "";
  const section = card("Groups", h("div", { class: "controls" },
    field("text", h("input", { type: "search", id: "filter-text", placeholder: "prompt, label, reason" })),
    choice("state", states), choice("status", statuses),
    h("label", {}, "reward ", field("low", h("input", { type: "number", step: "any", id: "filter-low", placeholder: "from" })), " – ",
      field("high", h("input", { type: "number", step: "any", id: "filter-high", placeholder: "to" })))), holder);
  draw();
  return all.length ? section : card("Groups", notice("No samples of this step were recorded."));
}

function matches(group) {
  const text = filter.text.toLowerCase();
  return (!text || `${group.head} ${group.label} ${group.source ?? ""} ${group.reason ?? ""} ${group.group}`.toLowerCase().includes(text))
    && (!filter.state || group.state === filter.state)
    && (!filter.status || filter.status in group.statuses)
    && (filter.low === "" || (group.reward !== null && group.reward >= +filter.low))
    && (filter.high === "" || (group.reward !== null && group.reward <= +filter.high));
}

const chips = (run, at, group, low, high) => group.samples.length
  ? h("span", { class: "chips" }, group.samples.map(([position, index, reward, length, status]) =>
    h("a", { class: "chip " + (status === "completed" ? "" : "open"), href: link("sample", run.key, "rollout", at, position), style: `--chip: ${rewardColour(reward, low, high)}`,
      title: `sample ${index}: reward ${number(reward)}, ${length} tokens, ${status}`, "aria-label": `sample ${index}, reward ${number(reward)}` })))
  : number(group.n);

function metrics(values) {
  const pairs = Object.entries(values.metrics);
  if (!pairs.length) return h("span", {});
  return h("details", { class: "card" }, h("summary", {}, `All ${pairs.length} metrics of this step`),
    h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value, 4))))));
}
