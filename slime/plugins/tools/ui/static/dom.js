// Elements, numbers and tables. Every text goes through textContent, so no text of a run is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export function replace(element, ...children) {
  element.textContent = "";
  append(element, children);
}

// --- texts of numbers ---

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : value.toFixed(digits);
}

export const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(0) + "%");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return (1000 * value).toFixed(0) + " ms";
  if (value < 120) return value.toFixed(1) + " s";
  if (value < 7200) return Math.floor(value / 60) + " min " + Math.floor(value % 60) + " s";
  return Math.floor(value / 3600) + " h " + Math.floor((value % 3600) / 60) + " min";
}

export function ago(time) {
  return seconds(Math.max(Date.now() / 1000 - time, 0));
}

// --- addresses of views ---

export const link = (...parts) => "#/" + parts.map((part) => encodeURIComponent(String(part))).join("/");

// --- parts that several views use ---

export const card = (title, ...children) =>
  h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...children);

// A status of a user's own has no colour.
export const badge = (text, kind) => h("span", { class: "badge " + (/^[a-z ]+$/.test(kind ?? "") ? kind : "") }, text);

export const notice = (...children) => h("p", { class: "notice" }, ...children);

export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter((pair) => pair[1] !== null && pair[1] !== undefined && pair[1] !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

// The colour of a reward between the lowest and the highest of a table: red, amber, green.
export function rewardColour(value, low, high) {
  if (value === null || value === undefined) return "var(--faint)";
  const share = high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0;
  return `color-mix(in oklch, var(--bad), var(--good) ${Math.round(100 * share)}%)`;
}

// A table that is sorted by a click on a column's head.
// columns: {name, value: row => number|text, show?: row => node, left?: bool, title?: text}
export function table(columns, rows, options = {}) {
  let order = options.order ?? null;
  let down = options.down ?? false;
  const body = h("tbody", {});
  const most = options.most ?? 500;
  const heads = columns.map((column) =>
    h("th", { class: column.left ? "left" : "", title: column.title ?? "", scope: "col" },
      h("button", { type: "button", onclick: () => sortBy(column.name) }, column.name)));
  const element = h("div", { class: "scroll" },
    h("table", { id: options.id }, h("thead", {}, h("tr", {}, heads)), body));

  function sortBy(name) {
    down = order === name ? !down : true;
    order = name;
    options.onorder?.(order, down);
    draw();
  }

  function draw() {
    const column = columns.find((one) => one.name === order);
    const sorted = column ? [...rows].sort((a, b) => compare(column.value(a), column.value(b), down)) : rows;
    heads.forEach((head, i) => {
      const mine = columns[i].name === order;
      head.setAttribute("aria-sort", mine ? (down ? "descending" : "ascending") : "none");
    });
    replace(body, sorted.slice(0, most).map((row) => h("tr", options.row?.(row) ?? {}, columns.map((one) =>
      h("td", { class: one.left ? "left" : "" }, one.show ? one.show(row) : number(one.value(row)))))),
    sorted.length > most
      ? h("tr", {}, h("td", { class: "left muted", colspan: columns.length },
        `${most} of ${sorted.length} rows are shown; filter or sort to see others.`)) : null);
  }
  draw();
  return element;
}

function compare(a, b, down) {
  const missing = (x) => x === null || x === undefined;
  if (missing(a) || missing(b)) return missing(a) - missing(b); // rows without a value are always last
  const difference = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return down ? -difference : difference;
}
