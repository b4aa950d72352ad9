// The card of one token: every field, byte-true, from the page's JSON twin. Text goes in as text, never as HTML.

import { elementAt, isTokenView, offsetOf, pane } from "./token_places.js";

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
  loading ??= fetch(pane().dataset.json, { headers: { Accept: "application/json" } })
    .then((response) => {
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      return response.json();
    })
    .then((body) => { data = body; });
  return loading;
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

const number = (value) => value.toLocaleString("en-US");

function fill(offset) {
  const box = card();
  const list = box.querySelector("dl");
  list.replaceChildren();
  const token = data?.window.tokens[offset - data.window.start];
  box.querySelector(".card-title").textContent = `token ${number(offset)}`;
  if (!token) return;
  line(list, "text", token.text === null ? (token.bytes === null ? "not known" : "part of a character") : JSON.stringify(token.text), "mono");
  line(list, "id", String(token.id), "mono");
  line(list, "bytes", token.bytes === null ? "not known: no tokenizer" : token.bytes.replace(/../g, "$& ").trim() || "none", "mono");
  line(list, "origin", token.special ? `${token.origin}, control token` : token.origin);
  line(list, "loss mask", token.loss_mask ? "1: under the gradient" : "0: not trained");
  if (token.logprob !== null) {
    line(list, "logprob", `${token.logprob.toFixed(4)}  (p = ${probability(token.logprob)})`, "mono");
  } else {
    line(list, "logprob", token.origin === "sampled" ? "not recorded" : "none: not sampled");
  }
  for (const [name, value] of Object.entries(token.columns ?? {})) {
    line(list, name.replaceAll("_", " "), value === null ? "no value" : String(Number(value.toPrecision(6))), "mono");
  }
  line(list, "in the row", `${number(offset)} of ${number(data.row.n_tokens)}, row ${data.row.index}`);
  if (token.step !== null) line(list, "step", token.step_place);
  if (token.turn !== null) line(list, "message", token.turn);
  for (const finding of token.findings ?? []) line(list, "finding", finding, "card-finding");
}

function probability(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.001 ? `${(p * 100).toFixed(p > 0.1 ? 1 : 2)} %` : p.toExponential(1);
}

function place(element) {
  const box = card();
  const first = element.getClientRects()[0] ?? element.getBoundingClientRect();
  box.hidden = false;
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  const below = first.bottom + 8;
  box.style.left = `${Math.max(8, Math.min(first.left, innerWidth - width - 12))}px`;
  box.style.top = `${below + height > innerHeight && first.top > height + 16 ? first.top - height - 8 : below}px`;
}

/** Show the card of a token; `pin` keeps it until Esc. */
export async function showCard(element, pin = false) {
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
