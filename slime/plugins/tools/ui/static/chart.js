// Curves, drawn by uPlot.

import { h, number } from "slime/dom.js";

export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const probe = h("span", { hidden: true });
// A property as a colour that a canvas understands; as a text it may be light-dark(...).
const css = (name) => {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};
const faded = (colour) => colour.replace(/^rgb\((.*)\)$/, "rgba($1, 0.25)");
const uPlot = globalThis.uPlot;

// Steps are whole numbers, so an axis has no ticks between them; seconds may have them as well.
const INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e));

// Exponential moving average without the bias towards the first value. weight 0 returns the values.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// curves: [{label, colour, x: [], y: [], low?, high?}] Each has its own x values.
// options: {title, weight, height, xLabel, dots, onpick(x), sync}
export function chart(curves, options = {}) {
  const holder = h("div", { class: "plot" });
  const box = h("figure", { class: "chart" }, h("figcaption", {}, options.title ?? ""), holder);
  const state = { plot: null };
  box.redraw = () => draw(holder, curves, options, state);
  const watch = new ResizeObserver(() => {
    if (!holder.isConnected) return;
    if (state.plot) state.plot.setSize({ width: holder.clientWidth, height: options.height ?? 180 });
    else box.redraw();
  });
  watch.observe(holder);
  return box;
}

function draw(holder, curves, options, state) {
  if (!holder.clientWidth) return;
  state.plot?.destroy();
  const { data, series } = tables(curves, options.weight ?? 0, options.dots, options.xLabel ?? "step");
  const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const plot = new uPlot({
    width: holder.clientWidth,
    height: options.height ?? 180,
    series,
    scales: { x: { time: false, range: xRange }, y: { range } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => (options.xText ? options.xText(tick) : number(tick))), size: 30, incrs: INCREMENTS, space: options.xText ? 76 : 50 },
      { ...axis, values: (_, ticks) => tickTexts(ticks), size: 58 },
    ],
    cursor: { sync: options.sync ? { key: options.sync } : undefined, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { live: true, show: options.legend ?? true },
    padding: [8, options.xLabel === "time" ? 30 : 16, 0, 0], // half of a label at the right end
  }, data, holder);
  state.plot = plot;
  if (options.onpick) {
    plot.over.classList.add("pick");
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.select.width === 0) options.onpick(data[0][plot.cursor.idx]);
    });
  }
}

// One table with a common x, as uPlot wants it.
function tables(curves, weight, dots, xLabel) {
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const data = [xs];
  const series = [{ label: xLabel, value: (_, value) => number(value) }];
  const column = (curve, values) => {
    const found = new Array(xs.length).fill(undefined); // undefined: no value here, which is no gap
    curve.x.forEach((x, i) => { found[place.get(x)] = values[i]; });
    return found;
  };
  for (const curve of curves) {
    const stroke = css(curve.colour);
    if (weight) {
      data.push(column(curve, curve.y));
      series.push({ stroke: faded(stroke), width: 1, spanGaps: true, points: { show: false }, label: curve.label + " (raw)", class: "raw" });
    }
    data.push(column(curve, smooth(curve.y, weight)));
    series.push({
      label: curve.label, stroke, width: dots ? 0 : 1.75, spanGaps: true, value: (_, value) => number(value, 4),
      points: { show: dots || curve.x.length < 40, size: dots ? 6 : 4, fill: stroke, stroke },
    });
  }
  return { data, series };
}

// Around a single step, for which uPlot asks with a range of a hundred steps.
export function xRange({ data: [xs] }, low, high) {
  if (!xs.length) return [0, 1];
  return xs.length === 1 ? [Math.max(xs[0] - 1, 0), xs[0] + 1] : [low, high];
}

// A curve whose values are all equal gets a narrow axis around them; uPlot's own would go from 0 to 100 for zeros.
function range(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
}

// As many digits as neighbouring ticks need to differ.
export function tickTexts(ticks) {
  const texts = (digits) => ticks.map((tick) => short(tick, digits));
  const digits = [0, 1, 2, 3, 4, 5].find((many) => new Set(texts(many)).size === ticks.length) ?? 6;
  return texts(digits);
}

function short(value, digits) {
  const size = Math.abs(value ?? 0);
  if (size === 0) return value === null ? "" : "0";
  if (size >= 1e9) return (value / 1e9).toFixed(1 + digits) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1 + digits) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(digits) + "k";
  if (size < 1e-3) return value.toExponential(digits);
  return String(+value.toPrecision(3 + digits));
}
