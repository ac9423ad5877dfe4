// The time line of a step as SVG: a lane for the driver, each training rank and each engine; below them the samples in
// work, and the calls of each sample by group.

import { h, link, percent, replace, s, seconds } from "slime/dom.js";

const LEFT = 96, ROW = 22, LANE_ROW = 28, BAR = 16, LANE = 5, GAP = 7, AREA = 40;
const KINDS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8", "--c9", "--c10"];

export function drawTimeline(values, run) {
  const colours = palette(values);
  const scroll = h("div", { class: "scroll timeline", id: "timeline" });
  const zoom = h("input", { type: "range", min: 1, max: 12, step: 0.5, value: 1, "aria-label": "zoom", oninput: () => draw() });
  const draw = () => {
    const width = Math.max(scroll.clientWidth || 800, 320) * +zoom.value;
    replace(scroll, svg(values, colours, width, run));
  };
  new ResizeObserver(draw).observe(scroll);
  return h("div", {},
    h("ul", { class: "notes", id: "notes" }, values.notes.map((note) => h("li", {}, note))),
    h("div", { class: "controls" },
      h("span", { class: "legend" }, [...colours].map(([name, colour]) => h("span", {}, h("i", { style: `background: var(${colour})` }), name)),
        values.engines.length ? [["--running", "running requests"], ["--waiting", "waiting requests"]].map(([colour, name]) => h("span", {}, h("i", { style: `background: var(${colour})` }), name)) : null),
      h("label", {}, "zoom ", zoom)),
    scroll,
    values.more > 0 ? h("p", { class: "muted" }, "Ranks or engines at even distances are drawn; the notes are of all.") : null,
    values.hidden ? h("p", { class: "muted" }, `${values.hidden} groups that ended earlier are not drawn.`) : null);
}

// The same name has the same colour in every step and run; other names get the colours that are left.
const FIXED = { rollout: "--c1", train: "--c2", update_weights: "--c3", audit_weights: "--c4", eval: "--c5", save_model: "--c6", actor_train: "--c7", sglang_generate: "--c8", agent: "--c9", reward_model: "--c10" };

function palette(values) {
  const names = [...new Set([...values.phases.map((span) => span[0]), ...values.processes.flatMap((one) => one.spans.map((span) => span[0])), ...values.groups.flatMap((group) => group.samples.flatMap((one) => one.spans.map((span) => span[0])))])];
  const left = KINDS.filter((colour) => !names.some((name) => FIXED[name] === colour));
  let next = 0;
  return new Map(names.map((name) => [name, FIXED[name] ?? (left.length ? left : KINDS)[next++ % (left.length || KINDS.length)]]));
}

// Phases may overlap (an asynchronous run, or nested phases): each goes to the first row where it has room.
function stacked(spans) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span[1] + 1e-6);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = span[2];
    return [row, span];
  });
}

function svg(values, colours, width, run) {
  const scale = (width - LEFT - 12) / (values.seconds || 1);
  const x = (time) => LEFT + time * scale;
  const parts = [];
  const phases = stacked(values.phases);
  let y = 20;
  parts.push(label("driver", y + 12));
  for (const [row, span] of phases) parts.push(bar(span, x, y + row * ROW, BAR, colours, true));
  y += ROW * Math.max(1, ...phases.map(([row]) => row + 1)) + GAP;
  for (const one of values.processes) {
    const rows = stacked(one.spans);
    parts.push(...lane(one, y));
    for (const [row, span] of rows) parts.push(bar(span, x, y + row * ROW, BAR, colours, true, `${one.name}: `));
    y += LANE_ROW - ROW + ROW * Math.max(1, ...rows.map(([row]) => row + 1));
  }
  const most = Math.max(1, ...values.engines.flatMap((one) => one.loads.map(([, running, waiting]) => running + waiting)));
  for (const one of values.engines) {
    parts.push(...lane(one, y), ...load(one, x, y, most));
    y += LANE_ROW;
  }
  if (values.processes.length || values.engines.length) y += GAP;
  parts.push(label("in work", y + AREA / 2), ...area(values, x, y));
  y += AREA + GAP;
  for (const group of values.groups) {
    const height = Math.max(group.samples.length * LANE, 11);
    parts.push(label(`group ${group.group}`, y + Math.min(height / 2 + 4, 16)),
      s("rect", { x: x(group.start), y: y - 1, width: Math.max((group.end - group.start) * scale, 1), height: height + 1, class: "whole" }));
    group.samples.forEach((one, i) => one.spans.forEach((span) => parts.push(bar(span, x, y + i * LANE, LANE - 1, colours, false, `sample ${one.sample}: `))));
    y += height + GAP;
  }
  return s("svg", { width, height: y + 4, role: "img", "aria-label": `time line of step ${values.step}` }, ticks(values.seconds, x, y), parts);
}

// The name of a process, and the share of the time line in which it worked.
const lane = (one, y) => [label(one.name, y + 9), s("text", { x: LEFT - 8, y: y + 20, class: "who small" }, `busy ${percent(one.busy)}`)];

// The requests of an engine over time: running ones below, waiting ones above them.
function load(engine, x, y, most) {
  const height = ROW - 2;
  const from = (moment) => Math.max(x(moment), LEFT);
  const level = (value) => (y + height - (value / most) * height).toFixed(1);
  return engine.loads.flatMap(([moment, running, waiting], i) => {
    const next = engine.loads[i + 1]?.[0] ?? moment;
    const width = from(next) - from(moment);
    if (width <= 0 || !(running + waiting)) return [];
    const title = () => s("title", {}, `${engine.name} at ${moment.toFixed(1)} s: ${running} running, ${waiting} waiting`);
    const rect = (low, high, kind) => s("rect", { x: from(moment), y: level(high), width, height: level(low) - level(high), class: kind }, title());
    return [running ? rect(0, running, "running") : null, waiting ? rect(running, running + waiting, "waiting") : null].filter(Boolean);
  }).concat(s("line", { x1: LEFT, x2: x(engine.loads.at(-1)?.[0] ?? 0), y1: y + height, y2: y + height, class: "tick" }));
}

const label = (text, y) => s("text", { x: LEFT - 8, y, class: "who" }, text);

function bar([name, start, end], x, y, height, colours, text, who = "") {
  const width = Math.max(x(end) - x(start), 0.7);
  return s("g", {}, s("title", {}, `${who}${name} ${seconds(end - start)}, from ${start.toFixed(3)} s to ${end.toFixed(3)} s`),
    s("rect", { x: x(start), y, width, height, rx: text ? 3 : 1, style: `fill: var(${colours.get(name)})` }),
    text && width > name.length * 7 ? s("text", { x: x(start) + 5, y: y + 12, class: "inside" }, name) : null);
}

function area(values, x, y) {
  const most = Math.max(...values.active, 1);
  const points = values.active.map((count, i) => `${x((i / values.active.length) * values.seconds).toFixed(1)},${(y + AREA - (count / most) * AREA).toFixed(1)}`);
  return [s("polygon", { class: "area", points: `${x(0)},${y + AREA} ${points.join(" ")} ${x(values.seconds)},${y + AREA}` }, s("title", {}, `at most ${most} samples in work`)),
    s("text", { x: LEFT - 8, y: y + AREA / 2 + 14, class: "who small" }, `max ${most}`)];
}

export function ticks(total, x, bottom) {
  const width = x(total) - x(0);
  const rough = total / Math.max(width / 90, 1);
  const unit = 10 ** Math.floor(Math.log10(rough || 1));
  const every = [1, 2, 5, 10].map((m) => m * unit).find((one) => one >= rough) ?? unit;
  const lines = [];
  for (let time = 0; time <= total; time += every)
    lines.push(s("line", { x1: x(time), x2: x(time), y1: 14, y2: bottom, class: "tick" }),
      s("text", { x: Math.min(x(time) + 2, x(total) + 10), y: 10, class: "time", "text-anchor": x(total) - x(time) < 50 ? "end" : "start" }, seconds(time)));
  return lines;
}
