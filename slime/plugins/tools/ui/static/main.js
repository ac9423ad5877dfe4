// The frame of the page: which view is shown, for which run, and how it follows a run that goes on.

import * as api from "slime/api.js";
import { ago, badge, h, link, notice, replace } from "slime/dom.js";
import * as curves from "slime/curves.js";
import * as engines from "slime/engines.js";
import * as evaluations from "slime/evaluations.js";
import * as ledger from "slime/ledger.js";
import * as overview from "slime/overview.js";
import * as prompts from "slime/prompts.js";
import * as sample from "slime/sample.js";
import * as step from "slime/step.js";

// Each view is a module with watch(run, ...args), the paths whose change redraws it, and
// show(place, run, ...args), which draws it.
const VIEWS = { overview, curves, step, sample, prompts, prompt: prompts.one, evaluations, ledger, engines };
const TABS = [
  ["overview", "Overview"], ["curves", "Curves"], ["step", "Steps"], ["prompts", "Prompts"],
  ["evaluations", "Evaluations"], ["ledger", "Ledger"], ["engines", "Engines"],
];
const PARENT = { sample: "step", prompt: "prompts" };
const SECONDS = 2;
const LIVE = new Set(["running", "restarting", "remote"]);

const place = h("main", { id: "view" });
const bar = h("header", {});
const foot = h("footer", {});
let runs = [];
let shown = { hash: null, tags: "" };
let turn = 0; // of the newest draw; an older one that is still waiting for values gives up
let drawing = 0;
let version = null;

function where() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  const view = parts[0] in VIEWS ? parts[0] : "overview";
  const run = runs.find((one) => one.key === parts[1]) ?? runs[0];
  return { view, run, args: parts[1] === run?.key ? parts.slice(2) : [] };
}

function drawBar() {
  const { view, run } = where();
  const choose = h("select", { id: "run", "aria-label": "run", onchange: () => { location.hash = link(view === "sample" || view === "prompt" ? PARENT[view] : view, choose.value); } },
    runs.map((one) => h("option", { value: one.key, selected: one.key === run.key }, one.key)));
  const steps = run.planned ? `${run.steps} of ${run.planned} steps` : `${run.steps} steps`;
  replace(bar,
    h("a", { class: "brand", href: link("overview", run.key) }, "slime"), choose,
    badge(run.status, run.status),
    h("span", { class: "muted" }, steps, LIVE.has(run.status) && run.phase ? [" · ", run.phase.replaceAll("_", " "), " for ", ago(run.since)] : "",
      run.pending ? ` · indexing, ${run.pending} files left` : ""),
    h("button", { type: "button", class: "theme", title: "light, dark, or as the system", onclick: nextTheme }, themeName()),
    h("nav", {}, TABS.map(([name, text]) =>
      h("a", { href: link(name, run.key), class: name === (PARENT[view] ?? view) ? "here" : "" }, text))));
  bar.querySelector(".here")?.scrollIntoView({ block: "nearest", inline: "center" });
}

async function draw(onlyIfChanged) {
  const mine = ++turn;
  drawing += 1;
  try {
    await drawView(mine, onlyIfChanged);
  } finally {
    drawing -= 1;
  }
}

async function drawView(mine, onlyIfChanged) {
  const { view, run, args } = where();
  const module = VIEWS[view];
  const hash = [view, run.key, ...args].join("/");
  try {
    const watched = await Promise.all(module.watch(run, ...args).map((parts) => api.getTagged(...parts)));
    const tags = watched.map((entry) => entry.tag).join();
    if (mine !== turn) return; // another view was opened meanwhile
    if (onlyIfChanged && shown.hash === hash && shown.tags === tags) return;
    // A reader who has scrolled stays there when new values come.
    const again = shown.hash === hash;
    shown = { hash, tags };
    const fresh = h("div", { class: "view " + view });
    const scrolled = again ? window.scrollY : 0;
    await module.show(fresh, run, ...args);
    if (mine !== turn) return;
    replace(place, fresh);
    window.scrollTo(0, scrolled);
  } catch (error) {
    if (mine !== turn) return;
    if (onlyIfChanged && !(error instanceof api.Missing)) return lost(error);
    replace(place, notice(error.message));
    shown.hash = null;
  }
  document.title = `${run.key} · ${view} · slime`;
  document.body.dataset.ready = hash; // for tests
}

function lost(error) {
  replace(foot, notice("The server does not answer: ", error.message, " — is slime ui still running?"));
}

async function look() {
  runs = (await api.get("runs")).runs;
  if (!api.isExport()) replace(foot);
  drawBar();
}

async function follow() {
  if (!document.hidden) {
    try {
      await look();
      const { view, run } = where();
      // A run that has ended changes only while its files are still being indexed.
      const busy = document.activeElement?.closest?.("#view") && /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
      if (!busy && !drawing && (LIVE.has(run.status) || run.pending || run.key + run.version !== version)) {
        version = run.key + run.version;
        await draw(true);
      }
    } catch (error) {
      lost(error);
    }
  }
  setTimeout(follow, SECONDS * 1000);
}

// --- light and dark ---

const THEMES = ["auto", "light", "dark"];
function stored(value) {
  try { // a browser may refuse it to a file
    if (value !== undefined) localStorage.setItem("slime-theme", value);
    return localStorage.getItem("slime-theme") ?? "auto";
  } catch { return document.documentElement.dataset.theme ?? "auto"; }
}
const themeName = () => stored();
function nextTheme() {
  const next = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
  document.documentElement.dataset.theme = next;
  stored(next);
  drawBar();
  draw(false);
}

async function begin() {
  document.documentElement.dataset.theme = stored();
  document.getElementById("app").append(bar, place, foot);
  try {
    await api.start();
    await look();
  } catch (error) {
    return lost(error);
  }
  if (api.isExport()) replace(foot, notice(api.exportNote()));
  window.addEventListener("hashchange", () => { drawBar(); draw(false); });
  await draw(false);
  if (!api.isExport()) setTimeout(follow, SECONDS * 1000);
}

begin();
