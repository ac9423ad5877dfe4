// Values from the server, or from the page itself where it was exported as one file.

let exported = null;
const known = new Map(); // newest value of each path, with its tag

export async function start() {
  const holder = document.getElementById("slime-export");
  if (!holder) return;
  const bytes = Uint8Array.from(atob(holder.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  exported = await new Response(stream).json();
  holder.remove();
}

export const isExport = () => exported !== null;
export const exportNote = () => exported?.made ?? "";

export function path(...parts) {
  // Python's quote() also encodes these five.
  const quoted = (part) =>
    encodeURIComponent(part).replace(/[!'()*]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase());
  return "/api/" + parts.map((part) => quoted(String(part))).join("/");
}

export class Missing extends Error {}

export async function get(...parts) {
  return (await getTagged(...parts)).value;
}

// The value under a path, and a tag that changes with it.
export async function getTagged(...parts) {
  const where = path(...parts);
  if (exported) {
    if (!(where in exported.answers)) throw new Missing("The exported file does not have this. " + exported.made);
    return { value: exported.answers[where], tag: "exported" };
  }
  const before = known.get(where);
  const headers = before ? { "If-None-Match": before.tag } : {};
  const answer = await fetch(where, { headers, cache: "no-store" });
  if (answer.status === 304) return before;
  if (answer.status === 404) throw new Missing((await answer.json()).error);
  if (!answer.ok) throw new Error(await answer.text());
  const entry = { value: await answer.json(), tag: answer.headers.get("ETag") };
  known.delete(where);
  known.set(where, entry);
  if (known.size > 400) known.delete(known.keys().next().value);
  return entry;
}
