// The first view: how the run is, what it waits for, what the doctor finds, and what was recorded.

import { get, isExport } from "slime/api.js";
import { ago, badge, card, facts, h, link, notice, number, replace, seconds, table } from "slime/dom.js";
import { panel } from "slime/curves.js";

const FIRST = [
  "rollout/raw_reward", "train/loss", "train/entropy_loss", "rollout/response_len/mean",
  "train/train_rollout_logprob_abs_diff", "perf/step_time",
];

export const watch = (run) => [["run", run.key, "overview"]];

export async function show(place, run) {
  const values = await get("run", run.key, "overview");
  const findings = card("slime doctor", h("p", { class: "muted" }, "looking…"));
  get("run", run.key, "doctor").then(doctor, (error) => [notice(error.message)]).then((parts) => replace(findings, h("h2", {}, "slime doctor"), parts));
  const evaluated = values.names.filter((name) => /^eval\/[^/@]+$/.test(name) && !/-(truncated_ratio|reward_missing_count)$/.test(name));
  const several = values.names.filter((name) => /^rollout\/(reward\/[^/]+|source\/.+\/raw_reward)$/.test(name));
  const names = [...evaluated.slice(0, 2), ...FIRST, ...several.slice(0, 12)].filter((name) => values.names.includes(name));
  place.append(
    h("div", { class: "columns" }, status(values), findings),
    values.served.length ? served(values.served) : "",
    values.names.length ? await panel([run.key], names, { onpick: (x) => { location.hash = link("step", run.key, x); } }) : notice("No step has been trained yet."),
    h("div", { class: "columns" }, settings(values), recorded(values)));
}

function status(values) {
  const doing = {
    running: values.phase ? ["in ", h("b", {}, values.phase.replaceAll("_", " ")), " for ", ago(values.since)] : ["between phases for ", ago(values.since)],
    dead: ["The driver ended without saying so, in ", h("b", {}, values.phase || "no phase"), "; its last word was ", ago(values.since), " ago."],
    remote: ["The driver runs on ", values.host, ", which is not seen from here; it was last in ", h("b", {}, values.phase || "no phase"), "."],
    unknown: ["The run has no state.json, so how it ended is not known."],
  }[values.status] ?? [];
  return card("Status",
    h("p", { id: "status" }, badge(values.status, values.status), " ", doing),
    values.waiting ? waits(values) : null,
    facts([
      ["steps", `${values.steps}${values.planned ? " of " + values.planned : ""}`],
      ["reward", number(values.reward)],
      ["samples", number(values.samples)],
      ["wall time", values.last_time ? seconds(values.last_time - values.first_time) : null],
      ["last step", values.last_time && !isExport() ? ago(values.last_time) + " ago" : null],
      ["driver", values.host ? `${values.host}, process ${values.pid}` : null],
      ["unreadable lines", values.unreadable || null],
    ]),
    h("p", { class: "muted path" }, values.folder),
    values.error ? h("details", { open: true }, h("summary", {}, "The error that ended it"), h("pre", {}, values.error)) : null);
}

function waits(values) {
  const { what, since, deadline, said } = values.waiting;
  const over = ["running", "remote"].includes(values.status) ? "waits" : "waited";
  return h("div", { id: "waits" },
    h("p", {}, `The driver ${over} for `, h("b", {}, what), over === "waits" ? [" for ", ago(since)] : "", ` (deadline ${seconds(deadline)}).`),
    h("ul", { class: "waits" }, said.map((one) => h("li", {}, h("b", {}, one.name), ": ", one.phase ?? "has not answered",
      one.total ? ` ${one.done} of ${one.total}` : "", one.since && over === "waits" ? ` for ${ago(one.since)}` : ""))));
}

const served = (models) => card("Served models", table([
  { name: "tenant", left: true, value: (m) => m.tenant },
  { name: "session", left: true, value: (m) => m.session },
  { name: "model", left: true, value: (m) => m.model },
  { name: "weights", left: true, value: (m) => m.rank, show: (m) => m.rank ? `adapter of rank ${m.rank}` : "all" },
  { name: "commands done", value: (m) => m.commands },
  { name: "waiting", value: (m) => m.waiting },
  { name: "samplers of the session", value: (m) => m.samplers },
], models, { id: "served" }));

function doctor(found) {
  const findings = found.findings.map((finding) =>
    h("li", { class: finding.hint ? "hint" : "problem" },
      h("b", {}, finding.title), finding.hint ? " (hint)" : "",
      finding.evidence.length ? h("pre", {}, finding.evidence.join("\n")) : null,
      h("p", {}, finding.advice)));
  return [found.problem ? notice(found.problem) : null,
    findings.length ? h("ol", { class: "findings", id: "findings" }, findings) : h("p", { id: "findings" }, "Nothing conspicuous was found.")];
}

const settings = (values) => card("Settings", facts(Object.entries(values.settings).map(([name, value]) =>
  ["--" + name.replaceAll("_", "-"), Array.isArray(value) ? value.join(" ") : String(value)])));

const recorded = (values) => card("Recorded", h("ul", { class: "recorded" }, values.recorded.map((entry) =>
  h("li", {}, badge(entry.there ? "yes" : "no", entry.there ? "completed" : ""), " ", entry.what,
    entry.there ? "" : h("span", { class: "muted" }, " — ", entry.how)))));
