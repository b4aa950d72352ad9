// The trajectory page's keys, selection, pointer and live parts. Without it every page still reads: all of it is links and forms.

import { makeRoving, roveBy } from "./roving.js";
import { cardIsPinned, closeCard, leaveToken, prepareCard, resetCard, showCard } from "./token_card.js";
import { commentOn } from "./comments.js";
import { say } from "./status.js";
import { find } from "./token_find.js";
import "./token_selection.js";
import { chosenLens, keepLens, nextLens, setLens } from "./token_lens.js";
import {
  arriveAtFinding, forgetTurn, goFinding, goToEnd, goTurn, leaveSolo, openFinding, toggleSolo,
} from "./token_moves.js";
import {
  address, elementAt, exactText, isTokenView, offsetOf, pane, runAt, select, selected, textSelectionRange, toClipboard,
} from "./token_places.js";
import { addressInView, headLine, isElsewhere, keepPlace, noteAddress, placeInView, showPlace, swapReader } from "./token_view.js";

let anchor = null;
let firstG = -Infinity;

// --- other windows, lenses, views -------------------------------------------------------------------------------------
/** Another window: its first token, or its last turn, is in view and has the focus. */
async function openWindow(url, end = "start") {
  if (!(await swapReader(url, { part: "window" }))) return;
  arrive(false);
  if (end === "end") return goToEnd(false);
  document.getElementById("reader").scrollIntoView({ block: "start" });
  focusPane();
}

/** Another lens or view of the same place. */
async function swapInPlace(url) {
  const place = placeInView();
  const held = document.activeElement?.closest("#pane") ? null : focusedName();
  const target = addressInView(url, place);
  const solo = new URL(location.href).searchParams.get("solo");
  if (solo) target.searchParams.set("solo", solo);
  if (!(await swapReader(target))) return;
  arrive(false);
  if (place) showPlace(place);
  if (!focusAgain(held)) focusPane(place?.offset);
}

/** A name of what has the focus inside the reader, so that it has it again in the reader that follows. */
function focusedName() {
  const element = document.activeElement;
  if (!element?.closest("#reader, #live")) return null;
  if (offsetOf(element) !== undefined) return { offset: offsetOf(element) };
  for (const name of ["lensChoice", "viewChoice", "go"]) {
    if (name in element.dataset) return { css: `[data-${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}="${CSS.escape(element.dataset[name])}"]` };
  }
  if (element.id) return { css: `#${CSS.escape(element.id)}` };
  const href = element.getAttribute("href");
  return href ? { css: `#live a[href="${CSS.escape(href)}"]` } : {};
}

function focusAgain(held) {
  const element = held?.css && document.querySelector(held.css);
  element?.focus({ preventScroll: true });
  return Boolean(element);
}

/** The focus goes to a token, or to the head of the turn that holds the place: never to nothing. */
function focusPane(offset) {
  const token = isTokenView() ? (offset === undefined ? pane().querySelector(".toks i") : elementAt(offset)) : null;
  if (token) roam(token);
  const turn = offset === undefined ? null : runAt(offset)?.closest(".turn");
  const target = token ?? (turn ?? pane()).querySelector(".turn-head a") ?? pane();
  if (target === pane()) target.tabIndex = -1;
  target.focus({ preventScroll: true });
}

function leaveWindow(direction) {
  const link = document.querySelector(`[data-go=${direction}]`);
  if (link) openWindow(link.href);
}

function otherView() {
  const link = document.querySelector("a[data-view-choice]:not([aria-current])");
  if (link) swapInPlace(link.href);
}

function goToFarEnd(first) {
  const box = pane();
  if (first ? box.dataset.a === "0" : box.dataset.b === box.dataset.n) return goToEnd(first);
  const last = Math.max(Number(box.dataset.n) - 1, 0);
  const url = addressInView(location.href, { offset: first ? 0 : last });
  if (!isTokenView() || first) url.searchParams.set("w", first ? 0 : Math.max(last - 4095, 0));
  for (const name of ["t", "solo"]) url.searchParams.delete(name);
  return openWindow(url, first ? "start" : "end");
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

const ARROWS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };

/** True when the key moved among the tokens, or pinned one. */
function moveFocus(event) {
  // Where tokens are missing, a link of its own stands in the token behind the gap.
  if (event.target.closest?.(".gap")) return false;
  let element = event.target.closest?.("#pane i");
  // Without a token under the focus, an arrow starts at the one that the Tab key would reach.
  if (!element && isTokenView() && event.target === document.body && event.key in ARROWS) element = pane().querySelector("i[tabindex='0']");
  if (!element) return false;
  const here = offsetOf(element);
  if (here === undefined) return false;
  let next = null;
  if (event.key === "ArrowLeft") next = elementAt(here - 1);
  else if (event.key === "ArrowRight") next = elementAt(here + 1);
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = verticalNeighbour(element, here, event.key === "ArrowUp" ? -1 : 1);
  else if (event.key === "Home") next = element.parentElement.firstElementChild;
  else if (event.key === "End") next = element.parentElement.lastElementChild;
  else if (event.key === "Enter" || event.key === " ") { choose(here, event.shiftKey); showCard(element, true, true); return true; }
  else return false;
  if (!next) return true;
  roam(next);
  next.focus();
  if (event.shiftKey) {
    // A range that does not end here is left alone: the new one starts here.
    const range = selected();
    if (!range || (here !== range[0] && here !== range[1] - 1)) anchor = here;
    choose(offsetOf(next), true);
  }
  showCard(next, cardIsPinned(), true);
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

// --- keys -----------------------------------------------------------------------------------------------------------------
const click = (selector) => document.querySelector(selector)?.click();

const KEYS = {
  j: () => goTurn(1, leaveWindow),
  k: () => goTurn(-1, leaveWindow),
  n: () => goFinding(1),
  p: () => goFinding(-1),
  h: () => click("[data-go=sibling-previous]"),
  l: () => click("[data-go=sibling-next]"),
  "[": () => leaveWindow("previous"),
  "]": () => leaveWindow("next"),
  v: otherView,
  c: openConversation,
  m: () => nextLens(swapInPlace),
  f: toggleSolo,
  "/": () => document.querySelector("#find input")?.focus(),
  t: () => document.querySelector("#go-to input[name=t]")?.focus(),
  y: copyLink,
  a: commentOn,
  s: () => click("[data-seen]"),
  G: () => goToFarEnd(false),
};

/** The message that holds the chosen token, else the first token in view. */
function openConversation() {
  const link = document.querySelector("a[data-conversation]");
  if (!link) return;
  const url = new URL(link.href);
  const here = selected()?.[0] ?? placeInView()?.offset;
  const place = new URLSearchParams(url.searchParams.get("place"));
  if (here !== undefined) place.set("t", `${here}-${here + 1}`);
  url.searchParams.set("place", place);
  location.assign(url);
}

/** Esc ends one thing: what is typed, the Share form, the turn alone, or the pinned card with its range. */
function escape() {
  const typed = document.activeElement;
  const share = document.querySelector("details.share[open]");
  if (share) {
    share.open = false;
    share.querySelector("summary").focus();
  } else if (typed?.matches("#reader input, #reader select")) {
    focusPane(placeInView()?.offset);
  } else if (cardIsPinned() || selected()) {
    closeCard();
    select(null, true);
    clearRange();
  } else {
    closeCard();
    leaveSolo();
  }
}

document.addEventListener("keydown", (event) => {
  if (!pane() || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return escape();
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select, [contenteditable]")) return;
  if (roveBy(event) || moveFocus(event)) return event.preventDefault();
  if (event.key === "g") {
    // Once it is the start of `g r`, `g n`, `g i` and `g s`, which every page has.
    if (event.timeStamp - firstG < 1200) goToFarEnd(true);
    firstG = event.timeStamp;
    return;
  }
  const follows = event.timeStamp - firstG < 1200 && "rnis".includes(event.key);
  firstG = -Infinity;
  const action = KEYS[event.key];
  if (!action || follows) return;
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
  const isPlain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  const link = isPlain && event.target.closest?.("a[data-lens-choice], a[data-view-choice], #reader a[data-go], a.skip-to-tokens");
  if (link) {
    event.preventDefault();
    if (link.dataset.lensChoice) setLens(link, swapInPlace);
    else if ("viewChoice" in link.dataset) swapInPlace(link.href);
    else if (link.dataset.go) openWindow(link.href);
    else focusPane(placeInView()?.offset);
    return;
  }
  const listed = isPlain && event.target.closest?.(".outline a[href^='#']");
  if (listed) {
    event.preventDefault();
    leaveSolo();
    openListedTurn(listed);
    return;
  }
  const jump = event.target.closest?.("a.finding-jump");
  if (jump && isPlain && !("needsLens" in jump.dataset) && jump.dataset.row === pane()?.dataset.row) {
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

// --- find ---------------------------------------------------------------------------------------------------------------
function windowOf(offset) {
  const url = addressInView(location.href, { offset });
  url.searchParams.delete("solo");
  return url;
}

/** The list of turns is older than a window that was put in place: a turn that is not there is fetched. */
async function openListedTurn(link) {
  if (!document.querySelector(link.hash)) await openWindow(windowOf(Number(link.dataset.a)));
  const turn = document.querySelector(link.hash);
  turn?.scrollIntoView({ block: "start" });
  turn?.querySelector(".turn-head a").focus({ preventScroll: true });
}

/** The window that holds a row offset; what is typed stays typed. */
async function openAt(offset) {
  if (!(await swapReader(windowOf(offset), { part: "window" }))) return;
  arrive(false);
  // Before the text is selected: a field that gets the focus ends the selection.
  document.querySelector("#find input").focus({ preventScroll: true });
}

async function findNext(backwards) {
  const wanted = document.querySelector("#find input").value;
  const url = new URL(location.href);
  if (wanted) url.searchParams.set("find", wanted); else url.searchParams.delete("find");
  history.replaceState(history.state, "", url);
  noteAddress();
  leaveSolo();
  const answer = await find(wanted, backwards, placeInView()?.offset ?? 0, openAt);
  const box = document.querySelector("#find input");
  box.value = wanted;
  box.focus({ preventScroll: true });
  document.querySelector("#find output").textContent = answer;
}

document.addEventListener("formdata", (event) => {
  const wanted = new URL(location.href).searchParams.get("find");
  if (event.target.id === "go-to" && wanted) event.formData.set("find", wanted);
});
document.addEventListener("submit", (event) => {
  if (event.target.id !== "find") return;
  event.preventDefault();
  findNext(event.submitter?.value === "previous");
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !event.shiftKey || !event.target.matches?.("#find input")) return;
  event.preventDefault();
  findNext(true);
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

// Each is one stop of the Tab key.
const GROUPS = ".switch, .outline ol, .row-tabs, .tabs";
const isBack = performance.getEntriesByType("navigation")[0]?.type === "back_forward";

/** Read the reader that stands there. `moves`: the page was opened, so that its place comes into view. */
function arrive(moves = true) {
  if (!pane()) return;
  forgetTurn();
  resetCard();
  makeRoving((moves ? document : document.getElementById("reader")).querySelectorAll(GROUPS));
  keepLens(chosenLens());
  const params = new URL(location.href).searchParams;
  const box = document.querySelector("#find input");
  if (box && params.has("find")) box.value = params.get("find");
  const asked = params.get("t")?.match(/^(\d+)(?:-(\d+))?$/);
  const start = asked ? Number(asked[1]) : null;
  if (asked) {
    anchor = start;
    select([start, Number(asked[2] ?? start + 1)], true);
  }
  if (isTokenView()) {
    beReachable(asked && elementAt(start));
    prepareCard();
  }
  if (!moves) return;
  const marked = isTokenView() && asked ? elementAt(start) : pane().querySelector(".k");
  const top = params.get("top");
  if (top) {
    params.delete("top");
    const url = new URL(location.href);
    url.search = params;
    history.replaceState(history.state, "", url);
    noteAddress();
  }
  if (isBack && history.state?.place) {
    showPlace(history.state.place);
  } else if (top) {
    showPlace({ offset: Number(top), y: 0 });
  } else if (asked && marked) {
    marked.scrollIntoView({ block: "center" });
    // Arrows go on from the token that was asked for.
    if (isTokenView()) marked.focus({ preventScroll: true });
  } else if (marked && !location.hash && marked.getBoundingClientRect().bottom > innerHeight) {
    // Without a place in the address the page is drawn at its worst finding.
    marked.scrollIntoView({ block: "center" });
  }
  arriveAtFinding();
}

// The other tabs and a share link take along what is read here.
const placeFields = document.querySelector("[data-place-fields]")?.dataset.placeFields.split(" ") ?? [];

/** What is shown, as the parameters of an address; null without a token. An address that names no place shows one too. */
function shownPlace() {
  const place = pane() && placeInView();
  if (!place) return null;
  const url = new URL(location.href);
  const asks = url.searchParams;
  asks.delete("top");
  const drawn = document.querySelector("#go-to input[name=t]")?.defaultValue;
  if (drawn && !["row", "t", "w"].some((name) => asks.has(name))) asks.set("t", drawn);
  asks.set("row", pane().dataset.row);
  if (isTokenView()) asks.set("view", "tokens");
  const lens = document.querySelector("a[data-lens-choice][aria-current]")?.dataset.lensChoice;
  if (lens && lens !== "mask") asks.set("lens", lens);
  const here = addressInView(url, place).searchParams;
  const kept = new URLSearchParams(placeFields.filter((field) => here.get(field)).map((field) => [field, here.get(field)]));
  if (pane().getBoundingClientRect().top < headLine()) kept.set("top", place.offset);
  return kept;
}

for (const name of ["pointerdown", "focusin"]) {
  document.addEventListener(name, (event) => {
    const tab = event.target.closest?.(".tabs a:not([aria-current])");
    const kept = tab && shownPlace();
    if (!kept) return;
    const target = new URL(tab.href);
    target.searchParams.set("place", kept);
    tab.href = target.pathname + target.search;
  });
}

document.addEventListener("toggle", (event) => {
  const field = event.target.matches?.("details.share[open]") && event.target.querySelector("input[name=query]");
  const kept = field && shownPlace();
  if (kept) field.value = kept;
}, true);

// Once a scroll rests: what a page writes into its history while it is left may be lost.
let resting = 0;
addEventListener("scroll", () => {
  clearTimeout(resting);
  resting = setTimeout(keepPlace, 150);
}, { passive: true });
addEventListener("popstate", async (event) => {
  if (!pane() || !isElsewhere()) return;
  const place = event.state?.place;
  if (!(await swapReader(location.href, { push: false }))) return;
  arrive(false);
  if (place) showPlace(place);
  focusPane(place?.offset);
});

// A live page is not exchanged under a reader's hand: it does not ask, and an answer that comes too late is dropped.
for (const name of ["htmx:beforeRequest", "htmx:beforeSwap"]) {
  document.addEventListener(name, (event) => {
    if (event.target.id === "live" && (cardIsPinned() || selected() || !getSelection().isCollapsed)) event.preventDefault();
  });
}
let heldFocus = null;
document.addEventListener("htmx:beforeSwap", () => { heldFocus = focusedName(); });
document.addEventListener("htmx:afterSettle", (event) => {
  // The next part of the run view, or a live page that grew: the reader stays where they are.
  if (!pane()) return;
  const parts = pane().querySelectorAll(".blk");
  if (parts.length) pane().dataset.b = parts[parts.length - 1].dataset.b;
  if ((event.detail.target?.id ?? event.target.id) !== "live") return;
  resetCard();
  makeRoving(document.querySelectorAll(GROUPS));
  if (isTokenView()) beReachable();
  prepareCard();
  if (heldFocus && document.activeElement === document.body && !focusAgain(heldFocus)) focusPane(heldFocus.offset);
});
arrive();
