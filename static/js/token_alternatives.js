// The tokens that could have stood in place of a token, in its card. Text goes in as text, never as HTML.

import { pane } from "./token_places.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_TEXT = 24;

function made(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** The probability of a log-probability, in words. */
export function probability(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.001 ? `${(p * 100).toFixed(p > 0.1 ? 1 : 2)} %` : p.toExponential(1);
}

/** A share from 0 to 1 as a bar. The number beside it says the same. */
function bar(share) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of [["viewBox", "0 0 100 10"], ["preserveAspectRatio", "none"], ["class", "share"], ["aria-hidden", "true"]]) {
    svg.setAttribute(name, value);
  }
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("width", String(Math.max(0, Math.min(100, share * 100))));
  rect.setAttribute("height", "10");
  svg.append(rect);
  return svg;
}

function words(token) {
  if (token.text === null) return token.bytes === null ? "not known" : `bytes ${token.bytes}`;
  const cut = [...token.text];
  return JSON.stringify(cut.length > MAX_TEXT ? `${cut.slice(0, MAX_TEXT).join("")}…` : token.text);
}

function row(rank, token, isSampled) {
  const line = made("tr", "", isSampled ? "sampled" : "");
  const head = made("th", rank);
  head.scope = "row";
  const text = made("td", "", "mono");
  text.append(made("bdi", words(token)), ...(isSampled ? [made("strong", " ← sampled")] : []));
  const share = made("td", `${probability(token.logprob)} `);
  share.append(bar(Math.exp(token.logprob)));
  line.append(head, text, made("td", String(token.id), "mono"), share, made("td", token.logprob.toFixed(4), "mono"));
  return line;
}

function summary(told) {
  const n = told.alternatives.length;
  const sampled = told.rank ? `the sampled token is number ${told.rank}` : "the sampled token is not among them";
  return `${n} likeliest token${n === 1 ? "" : "s"} here: ${sampled}`;
}

function table(told) {
  const found = made("table");
  found.append(made("caption", summary(told)));
  const head = made("tr");
  for (const name of ["#", "text", "id", "probability", "logprob"]) {
    const cell = made("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const first = made("thead");
  first.append(head);
  const body = made("tbody");
  told.alternatives.forEach((one, at) => body.append(row(String(at + 1), one, at + 1 === told.rank)));
  if (!told.rank && told.sampled) body.append(row(`>${told.alternatives.length}`, told.sampled, true));
  found.append(first, body);
  return found;
}

/** The entropy, or the least that it can be, where it is not among the fields of the card. */
function entropy(told, columns) {
  if (told.entropy !== null) return "entropy" in columns ? [] : [made("p", `entropy ${told.entropy.toFixed(3)} nats`, "card-hint")];
  if (told.entropy_at_least === null) return [];
  return [made("p", `entropy at least ${told.entropy_at_least.toFixed(3)} nats: the engine told no more`, "card-hint")];
}

let wanted = 0;

/** Fill the part of a card. Only a pinned card asks the server; `moved()` is called when the card has grown. */
export async function drawAlternatives(box, offset, data, pinned, moved) {
  const mine = ++wanted;
  const part = box.querySelector(".card-alternatives");
  const [, , n] = data.alternatives.find(([start, stop]) => start <= offset && offset < stop) ?? [];
  part.hidden = !n;
  part.replaceChildren();
  if (!n) return;
  if (!pinned) {
    part.append(made("p", "Alternatives were kept: press the token to see them.", "card-hint"));
    return;
  }
  const url = new URL(pane().dataset.alternatives, location.href);
  url.searchParams.set("t", offset);
  let told = null;
  try {
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    told = answer.ok ? await answer.json() : null;
  } catch {
    told = null;
  }
  if (mine !== wanted) return;
  if (!told || told.missing) part.append(made("p", told ? told.missing : "The server does not answer. Press the token again.", "card-hint"));
  else {
    part.append(table(told), ...entropy(told, data.columns));
    document.getElementById("announcer").textContent = summary(told);
  }
  moved();
}
