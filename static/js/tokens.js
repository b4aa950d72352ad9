// The trajectory page's keys, selection, lens and live parts. Without it every page still reads: all of it is links and forms.

import { cardIsPinned, closeCard, leaveToken, prepareCard, resetCard, showCard } from "./token_card.js";
import { find } from "./token_find.js";
import {
  address, elementAt, exactText, isTokenView, offsetOf, pane, reindex, runAt, select, selected, textSelectionRange, toClipboard,
} from "./token_places.js";

const say = (text) => {
  const status = document.getElementById("pane-status");
  if (status) status.textContent = text;
};

let anchor = null;
let firstG = 0;

// --- turns and findings ---------------------------------------------------------------------------------------------
const heads = () => [...document.querySelectorAll("#pane .turn-head")];

// The turn that j and k reached: near the end of a page a turn cannot be scrolled to the top. A scroll by hand forgets it.
let turnAt = null;
for (const name of ["wheel", "touchmove", "pointerdown"]) {
  document.addEventListener(name, () => { turnAt = null; }, { passive: true });
}

function headLine() {
  return (document.querySelector(".reader-bar")?.getBoundingClientRect().bottom ?? 0) + 4;
}

function goTurn(step) {
  const all = heads();
  if (!all.length) return;
  // Sections, not heads: a sticky head is always in view.
  const line = headLine();
  const tops = all.map((head) => head.parentElement.getBoundingClientRect().top);
  let current = turnAt ?? -1;
  if (turnAt === null) tops.forEach((top, i) => { if (top <= line + 2) current = i; });
  const next = step > 0 || turnAt !== null ? current + step : tops[current] < line - 6 ? current : current - 1;
  if (next < 0) return document.querySelector("[data-go=previous]")?.click();
  if (next >= all.length) return document.querySelector("[data-go=next]")?.click();
  turnAt = next;
  all[next].parentElement.scrollIntoView({ block: "start" });
  all[next].querySelector("a")?.focus({ preventScroll: true });
  say(all[next].querySelector(".turn-name")?.textContent ?? "");
}

const findings = () => [...document.querySelectorAll("a.finding-jump")];
let findingAt = -1;

function goFinding(step) {
  const all = findings();
  if (!all.length) return say("no findings");
  if (findingAt < 0) findingAt = all.findIndex((link) => link.getAttribute("aria-current") === "true");
  findingAt = findingAt < 0 ? (step > 0 ? 0 : all.length - 1) : (findingAt + step + all.length) % all.length;
  if (all[findingAt].dataset.row) return openFinding(all[findingAt]);
  // It lies in no row: the key would leave the page and lose the list. Its link has the focus, Enter follows it.
  mark(all[findingAt]);
  all[findingAt].focus();
  say(`finding ${findingAt + 1} of ${all.length}, in no row: Enter opens it`);
}

function mark(link) {
  const all = findings();
  findingAt = all.indexOf(link);
  all.forEach((other) => other.removeAttribute("aria-current"));
  link.setAttribute("aria-current", "true");
  link.scrollIntoView({ block: "nearest" });
  say(`finding ${findingAt + 1} of ${all.length}`);
}

function openFinding(link) {
  mark(link);
  const [row, start, stop] = [link.dataset.row, Number(link.dataset.a), Number(link.dataset.b)];
  if (link.dataset.needsLens !== undefined || row === "" || row !== pane()?.dataset.row || !reveal(start, Math.max(stop, start + 1))) location.assign(link.href);
}

/** Bring a range that is already on the page into view; false when it is not there. */
function reveal(start, stop) {
  const box = pane();
  if (start < Number(box.dataset.a) || start >= Number(box.dataset.b)) return false;
  const element = isTokenView() ? elementAt(start) : runAt(start);
  if (!element) return false;
  select([start, stop]);
  // The run view knows runs, not tokens: open the page on the exact range only when the run is long.
  if (!isTokenView()) flash(element);
  element.scrollIntoView({ block: "center" });
  return true;
}

function flash(element) {
  for (const other of document.querySelectorAll(".toks .at")) other.classList.remove("at");
  element.classList.add("at");
}

// --- the selection ----------------------------------------------------------------------------------------------------
function choose(offset, extend) {
  if (extend && anchor !== null) select([Math.min(anchor, offset), Math.max(anchor, offset) + 1]);
  else { anchor = offset; select([offset, offset + 1]); }
}

async function copyLink() {
  const chosen = textSelectionRange() ?? selected();
  const link = address(chosen);
  await toClipboard(link);
  say(chosen ? `link to tokens ${chosen[0]}-${chosen[1]} copied` : "link to this page copied");
}

function roam(element) {
  for (const other of pane().querySelectorAll("i[tabindex]")) other.removeAttribute("tabindex");
  element.tabIndex = 0;
}

function moveFocus(event) {
  const element = event.target.closest?.("#pane i, #pane .gap");
  if (!element || element.matches(".gap")) return false;
  const here = offsetOf(element);
  let next = null;
  if (event.key === "ArrowLeft") next = elementAt(here - 1);
  else if (event.key === "ArrowRight") next = elementAt(here + 1);
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = verticalNeighbour(element, here, event.key === "ArrowUp" ? -1 : 1);
  else if (event.key === "Home") next = element.parentElement.firstElementChild;
  else if (event.key === "End") next = element.parentElement.lastElementChild;
  else if (event.key === "Enter" || event.key === " ") { choose(here, event.shiftKey); showCard(element, true); event.preventDefault(); return true; }
  else return false;
  event.preventDefault();
  if (!next) return true;
  roam(next);
  next.focus();
  if (event.shiftKey) choose(offsetOf(next), true);
  showCard(next, cardIsPinned());
  return true;
}

function verticalNeighbour(element, here, direction) {
  const from = element.getBoundingClientRect();
  let best = null;
  let line = null;
  for (let at = here + direction, other; (other = elementAt(at)); at += direction) {
    const box = other.getBoundingClientRect();
    if (Math.abs(box.top - from.top) < 6) continue;
    if (line !== null && Math.abs(box.top - line) > 6) break;
    line = box.top;
    if (!best || Math.abs(box.left - from.left) < Math.abs(best.getBoundingClientRect().left - from.left)) best = other;
  }
  return best;
}

// --- the lens -----------------------------------------------------------------------------------------------------------
const lensLinks = () => [...document.querySelectorAll("a[data-lens-choice]")];
const lensLink = (lens) => lensLinks().find((link) => link.dataset.lensChoice === lens);

/** A trainer's column has no link of its own here: the server draws it. */
function needsRequest(lens) {
  const when = [pane()?.dataset.lens, lens].map((name) => lensLink(name)?.dataset.lensRequest ?? "always");
  return when.includes("always") || (!isTokenView() && when.includes("runs"));
}

function nextLens() {
  const all = lensLinks().map((link) => link.dataset.lensChoice);
  setLens(all[(all.indexOf(pane().dataset.lens) + 1) % all.length]);
}

function setLens(lens) {
  const link = lensLink(lens);
  if (!link) return;
  if (needsRequest(lens)) return link.click();
  document.getElementById("reader").dataset.lens = lens;
  pane().dataset.lens = lens;
  for (const other of document.querySelectorAll("[data-for]")) other.hidden = other.dataset.for !== lens;
  for (const other of lensLinks()) {
    if (other === link) other.setAttribute("aria-current", "true"); else other.removeAttribute("aria-current");
  }
  const url = new URL(location.href);
  if (lens === "mask") url.searchParams.delete("lens"); else url.searchParams.set("lens", lens);
  history.replaceState(history.state, "", url);
  for (const other of document.querySelectorAll("a[data-keeps-lens]")) {
    const target = new URL(other.href);
    if (lens === "mask") target.searchParams.delete("lens"); else target.searchParams.set("lens", lens);
    other.href = target.pathname + target.search;
  }
  say(`lens: ${link.textContent.trim()}`);
}

// --- keys -----------------------------------------------------------------------------------------------------------------
const click = (selector) => document.querySelector(selector)?.click();

const KEYS = {
  j: () => goTurn(1),
  k: () => goTurn(-1),
  n: () => goFinding(1),
  p: () => goFinding(-1),
  h: () => click("[data-go=sibling-previous]"),
  l: () => click("[data-go=sibling-next]"),
  ArrowLeft: () => click("[data-go=sibling-previous]"),
  ArrowRight: () => click("[data-go=sibling-next]"),
  "[": () => click("[data-go=previous]"),
  "]": () => click("[data-go=next]"),
  v: () => click("a[data-view-choice]:not([aria-current])"),
  m: nextLens,
  f: () => { pane().toggleAttribute("data-solo"); solo(); },
  "/": () => document.querySelector("#find input")?.focus(),
  t: () => document.querySelector("#go-to input[name=t]")?.focus(),
  y: copyLink,
  G: () => { heads().at(-1)?.parentElement.scrollIntoView({ block: "end" }); },
  g: () => {
    if (Date.now() - firstG < 700) heads()[0]?.parentElement.scrollIntoView({ block: "start" });
    firstG = Date.now();
  },
};

function solo() {
  const on = pane().hasAttribute("data-solo");
  const line = headLine();
  let current = null;
  for (const head of heads()) if (head.parentElement.getBoundingClientRect().top <= line + 2) current = head.parentElement;
  current ??= heads()[0]?.parentElement;
  for (const head of heads()) head.parentElement.classList.toggle("solo", on && head.parentElement === current);
  current?.scrollIntoView({ block: "start" });
  say(on ? "one turn alone; f shows all" : "all turns");
}

document.addEventListener("keydown", (event) => {
  if (!pane() || event.defaultPrevented) return;
  if (event.key === "Escape") {
    if (document.activeElement?.matches("input, textarea, select")) document.activeElement.blur();
    else if (cardIsPinned()) closeCard();
    else if (selected()) { select(null, true); clearRange(); }
    closeCard();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select, [contenteditable]") || document.querySelector("dialog[open]")) return;
  if (moveFocus(event)) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

function clearRange() {
  const url = new URL(location.href);
  url.searchParams.delete("t");
  history.replaceState(history.state, "", url);
  for (const element of pane().querySelectorAll(".k")) element.classList.remove("k");
}

// --- the pointer ----------------------------------------------------------------------------------------------------------
// A gap is a link inside the token before it.
const tokenUnder = (event) => (event.target.closest?.(".gap") ? null : event.target.closest?.("#pane[data-view=tokens] .toks i"));

document.addEventListener("mouseover", (event) => {
  const token = tokenUnder(event);
  if (token) showCard(token);
  else if (!event.target.closest?.("#token-card")) leaveToken();
});

document.addEventListener("click", (event) => {
  const token = tokenUnder(event);
  if (token) {
    if (!getSelection().isCollapsed && !event.shiftKey) return;
    if (event.shiftKey) getSelection().removeAllRanges();
    choose(offsetOf(token), event.shiftKey);
    roam(token);
    token.focus({ preventScroll: true });
    showCard(token, true);
    return;
  }
  if (event.target.closest?.("[data-close-card]")) return closeCard();
  const choice = event.target.closest?.("a[data-lens-choice]");
  if (choice && !event.ctrlKey && !event.metaKey && !event.shiftKey && !needsRequest(choice.dataset.lensChoice)) {
    event.preventDefault();
    setLens(choice.dataset.lensChoice);
    return;
  }
  const jump = event.target.closest?.("a.finding-jump");
  if (jump && !event.ctrlKey && !event.metaKey && !event.shiftKey && jump.dataset.row === pane()?.dataset.row && jump.dataset.needsLens === undefined) {
    event.preventDefault();
    openFinding(jump);
    return;
  }
  if (event.target.closest?.("[data-copy-link]")) copyLink();
});

document.addEventListener("copy", (event) => {
  const selection = getSelection();
  if (!selection || selection.isCollapsed || !pane()?.contains(selection.anchorNode)) return;
  event.clipboardData.setData("text/plain", exactText(selection));
  event.preventDefault();
});

document.addEventListener("submit", (event) => {
  if (event.target.id !== "find") return;
  event.preventDefault();
  const backwards = event.submitter?.value === "previous";
  const answer = find(event.target.querySelector("input").value, backwards);
  event.target.querySelector("output").textContent = answer;
});

// Drag over the strip: a range of tokens to zoom into.
let dragFrom = null;
const stripOffset = (strip, event) => {
  const box = strip.getBoundingClientRect();
  const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  return Math.round(Number(strip.dataset.a) + share * (Number(strip.dataset.b) - Number(strip.dataset.a)));
};
document.addEventListener("pointerdown", (event) => {
  const strip = event.target.closest?.("svg[data-zoom]");
  dragFrom = strip && event.button === 0 ? [strip, stripOffset(strip, event)] : null;
});
document.addEventListener("pointerup", (event) => {
  if (!dragFrom) return;
  const [strip, from] = dragFrom;
  dragFrom = null;
  const to = stripOffset(strip, event);
  if (Math.abs(to - from) < Math.max(2, (Number(strip.dataset.b) - Number(strip.dataset.a)) / 300)) return;
  const url = new URL(location.href);
  url.searchParams.set("view", "tokens");
  url.searchParams.set("t", `${Math.min(from, to)}-${Math.max(from, to)}`);
  url.searchParams.delete("w");
  location.assign(url);
});

// --- arrival ----------------------------------------------------------------------------------------------------------------
/** One token of the pane takes the Tab key; arrows go on from there. */
function beReachable(token) {
  const first = token || pane().querySelector(".toks i");
  if (first) first.tabIndex = 0;
}

function arrive() {
  if (!pane()) return;
  turnAt = null;
  reindex();
  resetCard();
  const asked = new URL(location.href).searchParams.get("t")?.match(/^(\d+)(?:-(\d+))?$/);
  if (asked) {
    const [start, stop] = [Number(asked[1]), Number(asked[2] ?? Number(asked[1]) + 1)];
    anchor = start;
    select([start, stop], true);
    (isTokenView() ? elementAt(start) : runAt(start) && pane().querySelector(".k"))?.scrollIntoView({ block: "center" });
  }
  // Without a place in the address the page is drawn at its worst finding.
  const fault = !asked && !location.hash && pane().querySelector(".k");
  if (fault && fault.getBoundingClientRect().bottom > innerHeight) fault.scrollIntoView({ block: "center" });
  if (isTokenView()) {
    beReachable(asked && elementAt(Number(asked[1])));
    prepareCard();
  }
  const current = findings().findIndex((link) => link.getAttribute("aria-current") === "true");
  if (current >= 0) say(`finding ${current + 1} of ${findings().length}`);
}

// A live page is not exchanged under a reader's hand: it does not ask, and an answer that comes too late is dropped.
for (const name of ["htmx:beforeRequest", "htmx:beforeSwap"]) {
  document.addEventListener(name, (event) => {
    if (event.target.id === "live" && (cardIsPinned() || selected() || !getSelection().isCollapsed)) event.preventDefault();
  });
}
document.addEventListener("htmx:afterSettle", (event) => {
  const id = event.detail.target?.id ?? event.target.id;
  if (id === "reader") arrive();
  // The next part of the run view, or a live page that grew: the reader stays where they are.
  else if (pane()) {
    reindex();
    if (id === "live") {
      resetCard();
      if (isTokenView()) beReachable();
      prepareCard();
    }
  }
});
arrive();
