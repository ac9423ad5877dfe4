// A sample as a conversation, and token by token.

import { Missing, get } from "slime/api.js";
import { badge, card, facts, h, link, notice, number, replace, table } from "slime/dom.js";

const TURN = /<[|｜]im_start[|｜]>\s*([\w-]+)\s*\n([\s\S]*?)(?:<[|｜]im_end[|｜]>\s*|(?=<[|｜]im_start)|$)/g;
const NOISE = 0.02; // gaps far below this are rounding, and stay pale
const chosen = { what: "gap" };

export const watch = (run, kind, at, position) => [["run", run.key, "sample", kind, at, position]];

export async function show(place, run, kind, at, position) {
  const values = await get("run", run.key, "sample", kind, at, position);
  const record = values.record;
  place.append(head(run, values), h("div", { class: "columns" }, talk(record), aside(run, values)));
  const tokens = card("Tokens", h("p", { class: "muted" }, "reading the dump…"));
  place.append(tokens);
  // The first dump takes seconds to read; the rest of the page does not wait for it.
  tokenPart(run, values).catch((error) => notice(error.message)).then((part) => replace(tokens, h("h2", {}, "Tokens"), part));
}

function head(run, values) {
  const around = values.siblings;
  const here = around.indexOf(values.position);
  const to = (i) => link("sample", run.key, values.kind, values.step, around[i]);
  const move = (i, text, id) => (i >= 0 && i < around.length ? h("a", { class: "button", id, href: to(i) }, text) : h("span", { class: "button off" }, text));
  const place = values.kind === "rollout" ? h("a", { href: link("step", run.key, values.step) }, `step ${values.step}`) : `${values.kind.replace("eval-", "evaluation ")} at ${values.step}`;
  return h("div", { class: "controls" }, move(here - 1, "←", "before"), move(here + 1, "→", "after"),
    h("span", {}, place, around.length ? ` · group ${values.row.group_index}, sample ${here + 1} of ${around.length}` : ""),
    h("a", { href: link("prompt", run.key, values.row.prompt), id: "to-prompt" }, "all samples of this prompt"));
}

// The turns of a text in ChatML; other texts are one turn.
export function turns(text, role) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(TURN)) {
    if (text.slice(end, match.index).trim()) found.push({ role, text: text.slice(end, match.index) });
    found.push({ role: match[1], text: match[2] });
    end = match.index + match[0].length;
  }
  if (text.slice(end).trim() || !found.length) found.push({ role, text: text.slice(end) });
  return found;
}

function content(message) {
  const body = message.content;
  const text = typeof body === "string" ? body : Array.isArray(body) ? body.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("\n") : body === null || body === undefined ? "" : JSON.stringify(body, null, 1);
  return text + (message.tool_calls ? "\n" + JSON.stringify(message.tool_calls, null, 1) : "");
}

function talk(record) {
  const prompt = Array.isArray(record.prompt) ? record.prompt.map((message) => ({ role: message?.role ?? "prompt", text: content(message ?? {}) })) : turns(String(record.prompt ?? ""), "prompt");
  const shown = prompt.filter((turn, i) => !(i === prompt.length - 1 && turn.role === "assistant" && !turn.text.trim()));
  const answer = turns(String(record.response ?? "").replace(/<[|｜]im_end[|｜]>\s*$/, ""), "assistant");
  const bubble = (turn, made) => h("div", { class: `turn ${turn.role} ${made ? "made" : ""}` }, h("span", { class: "role" }, turn.role), h("div", { class: "text" }, turn.text || "(empty)"));
  return card("Conversation", h("div", { class: "talk", id: "talk" }, shown.map((turn) => bubble(turn, false)), answer.map((turn) => bubble(turn, true))));
}

function aside(run, values) {
  const { record, row, ledger } = values;
  const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value, 4) : String(value));
  return card("Facts", facts([
    ["reward", text(record.reward)], ["label", text(record.label)], ["status", badge(record.status, record.status)],
    ["response tokens", number(record.response_length)], ["staleness", values.kind === "rollout" ? number(row.staleness) : null],
    ["sample, group", `${text(record.index)}, ${text(record.group_index)}`],
    ["outcome", ledger ? `${ledger.state}${ledger.reason ? ": " + ledger.reason : ""}` : null],
    ["returned to the data", ledger?.returns || null],
    ["weight versions", values.spans.map(([version, start, end]) => `${version} [${start}, ${end})`).join(" ") || text(record.weight_versions?.join(" "))],
  ]),
  Object.keys(record.metadata ?? {}).length ? h("details", {}, h("summary", {}, "Metadata"), h("pre", {}, JSON.stringify(record.metadata, null, 1))) : null);
}

async function tokenPart(run, values) {
  if (values.kind !== "rollout") return notice("The page shows tokens of training samples only; those of evaluations have no trainer's side.");
  if (values.row.sample_index === null) return notice("The sample has no index, so it cannot be found in a dump.");
  let found;
  try {
    found = await get("run", run.key, "tokens", values.step, values.row.sample_index);
  } catch (error) {
    if (!(error instanceof Missing)) throw error;
    return notice(error.message);
  }
  const notes = found.notes.map((note) => notice(note));
  return found.ids ? [...notes, tokenView(found, values)] : notes;
}

// --- tokens ---

function tokenView(found, values) {
  const length = found.texts.length - found.prompt;
  const columns = { ...found.columns };
  const meanings = { ...found.meanings };
  if (columns.log_probs && columns.rollout_log_probs) {
    columns.gap = columns.log_probs.map((value, i) => (value === null || columns.rollout_log_probs[i] === null ? null : value - columns.rollout_log_probs[i]));
    meanings.gap = "log-prob of the trainer minus that of the engine";
  }
  const versions = new Array(length).fill(null);
  for (const [version, start, end] of values.spans) versions.fill(version, start, end);
  if (values.spans.length) {
    columns.version = versions;
    meanings.version = "weights of the engine that sampled the token";
  }
  const names = ["gap", "rollout_log_probs", "log_probs", "advantages", "loss_masks", "version", ...Object.keys(columns)].filter((name, i, all) => name in columns && all.indexOf(name) === i);
  if (!names.includes(chosen.what)) chosen.what = names[0];
  const line = h("div", { class: "tokens", id: "tokens" });
  const legend = h("span", { class: "muted", id: "legend" });
  const detail = h("div", { class: "detail", id: "token" }, h("p", { class: "muted" }, "Point at a token, or tap it."));
  const mask = columns.loss_masks;
  const inspect = (i) => replace(detail, h("b", {}, JSON.stringify(found.texts[i])), ` id ${found.ids[i]}, position ${i}`,
    i >= found.prompt ? facts(names.map((name) => [name, typeof columns[name][i - found.prompt] === "string" ? columns[name][i - found.prompt] : number(columns[name][i - found.prompt], 5)])) : h("p", { class: "muted" }, "part of the prompt"));
  const draw = () => {
    const colour = chosen.what === undefined ? () => "" : colours(columns[chosen.what], chosen.what, legend);
    replace(line, found.texts.map((text, i) => {
      const at = i - found.prompt;
      const kind = at < 0 ? "tok prompt" : mask && !mask[at] ? "tok masked" : "tok";
      return h("span", { class: kind, style: at < 0 ? null : colour(columns[chosen.what]?.[at]), "data-i": i }, visible(text));
    }));
  };
  for (const event of ["mouseover", "click"])
    line.addEventListener(event, (what) => { const i = what.target.dataset?.i; if (i !== undefined) inspect(+i); });
  draw();
  return h("div", {},
    h("div", { class: "controls" }, h("label", {}, "colour by ", h("select", { id: "colour", onchange: (event) => { chosen.what = event.target.value; draw(); } },
      names.map((name) => h("option", { value: name, selected: name === chosen.what, title: meanings[name] }, name)))), legend),
    line, detail,
    h("details", {}, h("summary", {}, "As a table"), tokenTable(found, columns, names)));
}

const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t") || "·";

function tokenTable(found, columns, names) {
  const rows = found.texts.slice(found.prompt).map((text, i) => ({ i, text }));
  return table([
    { name: "#", value: (row) => row.i }, { name: "token", left: true, value: (row) => row.text, show: (row) => h("code", {}, JSON.stringify(row.text)) },
    ...names.map((name) => ({ name, value: (row) => columns[name][row.i], show: (row) => (typeof columns[name][row.i] === "string" ? columns[name][row.i] : number(columns[name][row.i], 5)) })),
  ], rows, { id: "token-table", most: 1000 });
}

// A function from a value to a style. Signed quantities go from blue over nothing to red, others from nothing to one hue.
function colours(values, name, legend) {
  if (name === "version") {
    const all = [...new Set(values.filter((value) => value !== null))];
    replace(legend, all.map((version, i) => h("span", { class: "legend" }, h("i", { style: `background: var(--c${1 + (i % 6)})` }), version)));
    return (value) => (value === null || value === undefined ? "" : `background: color-mix(in oklch, var(--c${1 + (all.indexOf(value) % 6)}) 35%, transparent)`);
  }
  const sizes = values.filter((value) => value !== null).map(Math.abs);
  const most = Math.max(...sizes, name === "gap" ? NOISE : 0);
  const signed = values.some((value) => value < 0) && values.some((value) => value > 0) || name === "gap" || name === "advantages";
  replace(legend, signed ? `blue −${number(most)} · none 0 · red +${number(most)}` : `none 0 · full ${values.some((v) => v < 0) ? "−" : ""}${number(most)}`);
  return (value) => {
    if (value === null || value === undefined || !most) return "";
    const share = Math.round(75 * Math.sqrt(Math.abs(value) / most));
    const hue = signed ? (value > 0 ? "var(--plus)" : "var(--minus)") : "var(--c1)";
    return `background: color-mix(in oklch, ${hue} ${share}%, transparent)`;
  };
}
