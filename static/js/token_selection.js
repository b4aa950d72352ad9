// What is selected: its figures, and copies of it as text, ids, link and Python.

import { columnsOf } from "./token_card.js";
import { address, isTokenView, pane, selected, textSelectionRange, toClipboard } from "./token_places.js";
import { say } from "./status.js";

let shown = null;

const bar = () => document.getElementById("selection");
const whole = (value) => value.toLocaleString("en-US");
const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

function trainedAt(columns, offset) {
  return columns.runs.findLast(([start]) => start <= offset)?.[2] ?? false;
}

/** The tokens [start, stop) as lists of one length. */
async function tokensOf([start, stop]) {
  const columns = await columnsOf(start, stop);
  if (!columns) return null;
  const from = start - columns.start;
  const ids = columns.ids.slice(from, stop - columns.start);
  const logprobs = ids.map((_, i) => columns.logprobs?.[from + i] ?? null).map((value) => (value === null ? null : value / 1e4));
  const entropy = columns.columns?.entropy?.slice(from, stop - columns.start) ?? [];
  const mask = ids.map((_, i) => trainedAt(columns, start + i));
  const hex = ids.map((id) => columns.bytes[id] ?? "").join("");
  const bytes = Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  return { start, stop, row: columns.row, ids, mask, logprobs, entropy, text: new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes) };
}

/** The mean of the values that are known, and over how many of all it is; null without one. */
function meanOf(values, all) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return null;
  return [known.reduce((sum, value) => sum + value, 0) / known.length, known.length === all ? "" : ` over ${whole(known.length)}`];
}

/** Tokens, trained tokens, and the means over the tokens that have a log-probability or an entropy. */
function figures({ ids, mask, logprobs, entropy }) {
  const parts = [plural(ids.length, "token"), `${whole(mask.filter(Boolean).length)} trained`];
  const [logprob, over] = meanOf(logprobs, ids.length) ?? [];
  if (over === undefined) parts.push("no log-probability");
  else parts.push(`mean log-probability ${logprob.toFixed(3)}${over}`, `perplexity ${Math.exp(-logprob).toFixed(3)}`);
  const [nats, among] = meanOf(entropy, ids.length) ?? [];
  if (among !== undefined) parts.push(`mean entropy ${nats.toFixed(3)} nats${among}`);
  return parts.join(" · ");
}

const python = (tokens) => {
  const list = (values) => `[${values.join(", ")}]`;
  return [
    `# ${address([tokens.start, tokens.stop])}`,
    `ids = ${list(tokens.ids)}`,
    `loss_mask = ${list(tokens.mask.map(Number))}`,
    `logprobs = ${list(tokens.logprobs.map((value) => (value === null ? "None" : value)))}  # rounded to 4 digits`,
    `text = ${JSON.stringify(tokens.text)}`,
    "",
  ].join("\n");
};

const COPIES = {
  text: (tokens) => tokens.text,
  ids: (tokens) => `[${tokens.ids.join(", ")}]`,
  link: (tokens) => address([tokens.start, tokens.stop]),
  python,
};

async function show(range) {
  const box = bar();
  if (!box) return;
  shown = range;
  if (!range) {
    box.hidden = true;
    return;
  }
  const tokens = await tokensOf(range).catch(() => null);
  if (shown !== range) return;
  const words = tokens ? figures(tokens) : `${plural(range[1] - range[0], "token")} · figures of at most 4,096`;
  box.querySelector("output").textContent = words;
  for (const button of box.querySelectorAll("[data-copy-as]")) button.disabled = !tokens && button.dataset.copyAs !== "link";
  searchFor(box.querySelector("[data-search]"), tokens?.ids ?? []);
  box.hidden = false;
}

/** The link that searches the run for these ids; a search takes at most 256 of them. */
function searchFor(link, ids) {
  if (!link) return;
  link.hidden = !ids.length || ids.length > 256;
  link.href = `${link.dataset.search}?by=ids&q=${ids.join("+")}`;
}

document.addEventListener("tokens:selected", () => show(selected()));

// A selection of text in the token view, once it rests.
let resting = 0;
document.addEventListener("selectionchange", () => {
  clearTimeout(resting);
  resting = setTimeout(() => {
    if (!pane() || !isTokenView() || document.activeElement?.matches("input, textarea")) return;
    const range = textSelectionRange();
    if (range) show(range);
    else if (!selected()) show(null);
  }, 250);
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy-as]");
  if (!button || !shown) return;
  const how = button.dataset.copyAs;
  const tokens = how === "link" ? { start: shown[0], stop: shown[1] } : await tokensOf(shown).catch(() => null);
  if (!tokens) return say("the server does not answer");
  await toClipboard(COPIES[how](tokens));
  say(`${button.textContent.trim().toLowerCase()} of ${plural(shown[1] - shown[0], "token")} copied`);
});
