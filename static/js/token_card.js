// The card of one token: every field, byte-true, from the columns of the window. Text goes in as text, never as HTML.

import { drawAlternatives, probability } from "./token_alternatives.js";
import { elementAt, isTokenView, offsetOf, pane } from "./token_places.js";

// What a screen reader says of the token that the keyboard reached. The card itself is silent: the pointer opens it too.
function announce(offset) {
  const token = tokenAt(offset);
  const announcer = document.getElementById("announcer");
  if (!announcer || !token) return;
  const parts = [
    token.text === null ? `id ${token.id}` : JSON.stringify(token.text), `token ${count(offset)}`, token.origin,
    token.loss_mask ? "trained" : "not trained",
    ...(token.logprob === null ? [] : [`log-probability ${token.logprob.toFixed(2)}`]), ...token.findings,
  ];
  announcer.textContent = parts.join(", ");
}

let data = null;
let loading = null;
let pinned = false;
let shown = null;

/** Forget the window's data: another window was swapped in. */
export function resetCard() {
  data = null;
  loading = null;
  closeCard();
}

function load() {
  loading ??= fetch(pane().dataset.card, { headers: { Accept: "application/json" } })
    .then((response) => {
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      return response.json();
    })
    .then((body) => { data = body; });
  return loading;
}

/** The last of some entries that start with an offset, at or before `offset`. */
function entryAt(entries, offset) {
  let low = 0;
  let high = entries.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (entries[middle][0] <= offset) low = middle; else high = middle - 1;
  }
  return entries[low];
}

function decoded(hex) {
  const bytes = Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return null;
  }
}

const PARTS = { delta: "ids put in" };

/** All fields of the token at a row offset; null outside the window. */
export function tokenAt(offset) {
  const at = offset - (data?.start ?? 0);
  if (!data || at < 0 || at >= data.ids.length) return null;
  const id = data.ids[at];
  const hex = data.bytes[id] ?? null;
  const [, origin, trained] = entryAt(data.runs, offset);
  const [start, stop, number, role, step, part] = entryAt(data.turns, offset) ?? [];
  return {
    id,
    bytes: hex,
    text: hex === null ? null : decoded(hex),
    special: data.special.includes(id),
    origin,
    loss_mask: trained,
    logprob: data.logprobs?.[at] === undefined || data.logprobs[at] === null ? null : data.logprobs[at] / 1e4,
    turn: number === undefined ? null : `turn ${number} · ${role}`,
    step_place: (step ?? null) === null ? null
      : `step ${step}, ${PARTS[part] ?? part} ${count(offset - start)} of ${count(stop - start)}`,
    findings: data.findings.filter(([first, last]) => first <= offset && offset < last).map(([, , words]) => words),
    columns: Object.entries(data.columns).map(([name, values]) => [name, values[at]]),
  };
}

const MOST = 4096;

/** The columns of a window that holds the tokens [start, stop); null for more than a window. */
export async function columnsOf(start, stop) {
  if (stop - start > MOST) return null;
  await load();
  if (data.start <= start && stop <= data.stop) return data;
  const url = new URL(pane().dataset.card, location.href);
  url.searchParams.set("w", start);
  const answer = await fetch(url);
  return answer.ok ? answer.json() : null;
}

const card = () => document.getElementById("token-card");

function line(list, name, value, className = "") {
  const term = document.createElement("dt");
  const definition = document.createElement("dd");
  term.textContent = name;
  definition.textContent = value;
  if (className) definition.className = className;
  list.append(term, definition);
}

const count = (value) => value.toLocaleString("en-US");

function fill(offset) {
  const box = card();
  const list = box.querySelector("dl");
  list.replaceChildren();
  const token = tokenAt(offset);
  box.querySelector(".card-title").textContent = `token ${count(offset)}`;
  if (!token) return;
  line(list, "text", token.text === null ? (token.bytes === null ? "not known" : "part of a character") : JSON.stringify(token.text), "mono");
  line(list, "id", String(token.id), "mono");
  line(list, "bytes", token.bytes === null ? "not known: no tokenizer" : token.bytes.replace(/../g, "$& ").trim() || "none", "mono");
  line(list, "origin", token.special ? `${token.origin}, control token` : token.origin);
  line(list, "loss mask", token.loss_mask ? "1: under the gradient" : "0: not trained");
  if (token.logprob !== null) {
    line(list, "logprob", `${token.logprob.toFixed(4)}  (p = ${probability(token.logprob)})`, "mono");
  } else if (data.alternatives.some(([start, stop]) => start <= offset && offset < stop)) {
    line(list, "logprob", "none in this row; what its step told stands below");
  } else {
    line(list, "logprob", token.origin === "sampled" ? "not recorded" : "none: not sampled");
  }
  for (const [name, value] of token.columns) {
    line(list, name, value === null ? "no value" : String(value), "mono");
  }
  line(list, "in the row", `${count(offset)} of ${count(data.n_tokens)}, row ${data.row}`);
  if (token.step_place !== null) line(list, "step", token.step_place);
  if (token.turn !== null) line(list, "message", token.turn);
  drawAlternatives(box, offset, data, pinned, () => shown && place(shown));
  for (const finding of token.findings) line(list, "finding", finding, "card-finding");
}

function place(element) {
  const box = card();
  const first = element.getClientRects()[0] ?? element.getBoundingClientRect();
  box.hidden = false;
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  const below = first.bottom + 8;
  box.style.left = `${Math.max(8, Math.min(first.left, innerWidth - width - 12))}px`;
  const above = first.top - height - 8;
  // Below the token, else above it, else where all of the card is in view.
  box.style.top = `${below + height <= innerHeight ? below : above >= 8 ? above : Math.max(8, innerHeight - height - 8)}px`;
}

/** Show the card of a token; `pin` keeps it until Esc, `aloud` has it read out. */
export async function showCard(element, pin = false, aloud = false) {
  if (!isTokenView() || !card()) return;
  const offset = offsetOf(element);
  if (offset === undefined || (pinned && !pin)) return;
  shown = element;
  pinned = pin;
  card().dataset.pinned = String(pin);
  try {
    await load();
  } catch (error) {
    loading = null;
    data = null;
  }
  if (shown !== element) return;
  fill(offset);
  place(element);
  if (aloud) announce(offset);
}

export function closeCard() {
  pinned = false;
  shown = null;
  if (card()) card().hidden = true;
}

export const cardIsPinned = () => pinned;

export function leaveToken() {
  if (!pinned) closeCard();
}

/** Fetch the window's fields when the browser has nothing better to do. */
export function prepareCard() {
  if (!isTokenView() || !card()) return;
  (window.requestIdleCallback ?? setTimeout)(() => load().catch(() => { loading = null; }));
}

export function moveCard(offset) {
  const element = elementAt(offset);
  if (element && pinned) showCard(element, true);
}
