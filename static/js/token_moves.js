// Moves over the row: turns, one turn alone, findings, both ends.

import { say } from "./status.js";
import { elementAt, isTokenView, lightUp, pane, runAt, select } from "./token_places.js";
import { headLine, noteAddress } from "./token_view.js";

// --- turns --------------------------------------------------------------------------------------------------------------
const heads = () => [...document.querySelectorAll("#pane .turn-head")];
const isSolo = () => pane()?.hasAttribute("data-solo") ?? false;

// The turn that j and k reached: near the end of a page a turn cannot be scrolled to the top. A scroll by hand forgets it.
let turnAt = null;
for (const name of ["wheel", "touchmove", "pointerdown"]) {
  document.addEventListener(name, () => { turnAt = null; }, { passive: true });
}
export function forgetTurn() {
  turnAt = null;
}

/** The index of the turn at the top of the window; -1 above the first. Sections are asked: a sticky head is always in view. */
function currentTurn(all) {
  if (isSolo()) return all.findIndex((head) => head.parentElement.classList.contains("solo"));
  if (turnAt !== null) return turnAt;
  const line = headLine();
  let current = -1;
  all.forEach((head, i) => { if (head.parentElement.getBoundingClientRect().top <= line + 2) current = i; });
  return current;
}

/** The address names the turn that is shown alone. */
function noteSolo() {
  const url = new URL(location.href);
  const turn = isSolo() && pane().querySelector(".turn.solo");
  if (turn) url.searchParams.set("solo", turn.id.replace("turn-", "")); else url.searchParams.delete("solo");
  // Without a place the page would open at its worst finding.
  if (turn && !["row", "t", "w"].some((name) => url.searchParams.has(name))) url.searchParams.set("row", pane().dataset.row);
  history.replaceState(history.state, "", url);
  noteAddress();
}

function openTurn(all, next) {
  turnAt = next;
  if (isSolo()) for (const head of all) head.parentElement.classList.toggle("solo", head === all[next]);
  if (isSolo()) noteSolo();
  all[next].parentElement.scrollIntoView({ block: "start" });
  all[next].querySelector("a")?.focus({ preventScroll: true });
  say(all[next].querySelector(".turn-name")?.textContent ?? "");
}

/** One turn on or back; past the ends, `leave` goes to the window before or after. */
export function goTurn(step, leave) {
  const all = heads();
  if (!all.length) return;
  const current = currentTurn(all);
  const onTop = turnAt !== null || isSolo() || current < 0 || all[current].parentElement.getBoundingClientRect().top >= headLine() - 6;
  const next = step > 0 || onTop ? current + step : current;
  if (next >= 0 && next < all.length) openTurn(all, next);
  else leave(step > 0 ? "next" : "previous");
}

export function toggleSolo() {
  const all = heads();
  const on = !isSolo();
  const current = Math.max(currentTurn(all), 0);
  pane().toggleAttribute("data-solo", on);
  all.forEach((head, i) => head.parentElement.classList.toggle("solo", on && i === current));
  if (all[current]) openTurn(all, current);
  if (!on) noteSolo();
  say(on ? "one turn alone; f or Esc shows all" : "all turns");
}

/** Show all turns again; false when all are shown. */
export function leaveSolo() {
  if (!isSolo()) return false;
  toggleSolo();
  return true;
}

export function goToEnd(first) {
  const all = heads();
  const turn = first ? all[0] : all.at(-1);
  if (!turn) return;
  turnAt = first ? 0 : all.length - 1;
  turn.querySelector("a")?.focus({ preventScroll: true });
  if (first) turn.parentElement.scrollIntoView({ block: "start" });
  else turn.parentElement.scrollIntoView({ block: "end" });
  say(first ? "start of the row" : "end of the row");
}

// --- findings -----------------------------------------------------------------------------------------------------------
// Muted findings are no stops of the keys while they are folded.
const findings = () => [...document.querySelectorAll("a.finding-jump")].filter((link) => !link.closest(".muted-findings:not([open])"));
let findingAt = -1;

export function goFinding(step) {
  const all = findings();
  if (!all.length) return say("no findings");
  if (findingAt < 0) findingAt = all.findIndex((link) => link.getAttribute("aria-current") === "true");
  findingAt = findingAt < 0 ? (step > 0 ? 0 : all.length - 1) : (findingAt + step + all.length) % all.length;
  if (all[findingAt].dataset.row) return openFinding(all[findingAt]);
  // It lies in no row: the key would leave the page and lose the list. Its link has the focus, Enter follows it.
  mark(all[findingAt]);
  all[findingAt].focus({ preventScroll: true });
  say(`finding ${findingAt + 1} of ${all.length}, in no row: Enter opens it`);
}

/** Scroll the list, and not the page, until the card is in view, its head at the top where the card is tall. */
function showCardOf(link) {
  const item = link.closest(".finding") ?? link;
  let list = item.parentElement;
  while (list && list !== document.body && list.scrollHeight <= list.clientHeight + 1) list = list.parentElement;
  if (!list || list === document.body || !/auto|scroll/.test(getComputedStyle(list).overflowY)) return;
  const box = item.getBoundingClientRect();
  const frame = list.getBoundingClientRect();
  if (box.top < frame.top || box.bottom > frame.bottom) list.scrollTop += box.top - frame.top - 4;
}

export function mark(link) {
  const all = findings();
  findingAt = all.indexOf(link);
  all.forEach((other) => other.removeAttribute("aria-current"));
  link.setAttribute("aria-current", "true");
  showCardOf(link);
  say(`finding ${findingAt + 1} of ${all.length}`);
}

export function openFinding(link) {
  mark(link);
  const [row, start, stop] = [link.dataset.row, Number(link.dataset.a), Number(link.dataset.b)];
  // A finding of another lens is opened by its address, which names the lens.
  if ("needsLens" in link.dataset || row === "" || row !== pane()?.dataset.row || !reveal(start, Math.max(stop, start + 1))) location.assign(link.href);
}

/** Bring a range that is already on the page into view; false when it is not there. */
function reveal(start, stop) {
  const box = pane();
  if (start < Number(box.dataset.a) || start >= Number(box.dataset.b)) return false;
  const element = isTokenView() ? elementAt(start) : runAt(start);
  if (!element) return false;
  leaveSolo();
  select([start, stop]);
  lightUp(element);
  element.scrollIntoView({ block: "center" });
  return true;
}

/** On arrival: the finding that the address names. */
export function arriveAtFinding() {
  findingAt = -1;
  const link = findings().find((one) => one.getAttribute("aria-current") === "true");
  if (link) mark(link);
}
