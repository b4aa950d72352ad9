// What of the row is in view: the place of the reader, and the exchange of the reader for another window, lens or view.

import { elementAt, isTokenView, offsetOf, pane, runAt, selected } from "./token_places.js";

const WINDOW = 4096;

/** The line below the bars that stick to the top of the window. */
export function headLine() {
  return (document.querySelector(".reader-bar")?.getBoundingClientRect().bottom ?? 0) + 4;
}

function shareOf(run) {
  const next = run.nextElementSibling?.dataset.a ?? run.closest(".blk").dataset.b;
  return Number(next) - Number(run.dataset.a);
}

const isSeen = (box) => box.bottom > headLine() && box.top < innerHeight;

/** The row offset that the reader looks at, and how far down the window it stands. */
export function placeInView() {
  const focused = offsetOf(document.activeElement) ?? selected()?.[0];
  const known = focused === undefined ? null : isTokenView() ? elementAt(focused) : runAt(focused);
  if (known && isSeen(known.getBoundingClientRect())) return { offset: focused, y: topOf(focused) };
  const line = headLine() + 28;
  const box = [...(pane()?.querySelectorAll(".toks") ?? [])].find((one) => one.getBoundingClientRect().bottom > line);
  if (!box) return null;
  const parts = [...box.querySelectorAll(isTokenView() ? "i" : "span[data-a]")];
  let low = 0;
  let high = parts.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (parts[middle].getBoundingClientRect().bottom > line) high = middle; else low = middle + 1;
  }
  if (!parts[low]) return null;
  if (isTokenView()) return { offset: offsetOf(parts[low]), y: parts[low].getBoundingClientRect().top };
  const drawn = parts[low].getBoundingClientRect();
  const share = Math.min(Math.max((line - drawn.top) / (drawn.height || 1), 0), 0.999);
  const offset = Number(parts[low].dataset.a) + Math.floor(share * shareOf(parts[low]));
  return { offset, y: topOf(offset) };
}

/** How far down the window a token stands: in the run view by its share of the run. */
function topOf(offset) {
  if (isTokenView()) return elementAt(offset)?.getBoundingClientRect().top;
  const run = runAt(offset);
  if (!run) return undefined;
  const box = run.getBoundingClientRect();
  return box.top + box.height * ((offset - Number(run.dataset.a)) / (shareOf(run) || 1));
}

/** Scroll until the token stands where it stood. Blocks get their heights when they come near, hence the second try. */
export function showPlace(place, again = 3) {
  const top = topOf(place.offset);
  if (top === undefined) return;
  const y = Math.min(Math.max(place.y ?? innerHeight / 3, headLine() + 28), innerHeight - 40);
  if (Math.abs(top - y) > 1) scrollBy(0, top - y);
  if (again) requestAnimationFrame(() => showPlace(place, again - 1));
}

// --- another window, lens or view -------------------------------------------------------------------------------------
const pageOf = (url) => {
  const { pathname, searchParams } = new URL(url, location.href);
  searchParams.delete("t");
  return `${pathname}?${searchParams}`;
};
let shown = pageOf(location.href);
let asked = 0;

/** Keep the place in the history's entry, so that Back returns to it. */
export function keepPlace() {
  const place = pane() && placeInView();
  if (place) history.replaceState({ ...history.state, place }, "");
}

/** The address of the token that is in view, in the given view. */
export function addressInView(url, place) {
  const target = new URL(url, location.href);
  if (!place) return target;
  const asks = target.searchParams;
  const tokens = asks.get("view") === "tokens";
  asks.delete("w");
  if (tokens) asks.set("w", Math.floor(place.offset / WINDOW) * WINDOW);
  else if (Number(pane().dataset.n) > 400000) asks.set("w", Math.max((Math.floor(place.offset / WINDOW) - 1) * WINDOW, 0));
  // The range stays in the address as long as the window shows it.
  const mark = asks.get("t")?.split("-").map(Number);
  if (tokens && mark && Math.floor(mark[0] / WINDOW) !== Math.floor(place.offset / WINDOW)) asks.delete("t");
  if (!asks.has("row") && !asks.has("w") && !asks.has("t")) asks.set("row", pane().dataset.row);
  return target;
}

/** Put what stands around the map of the row in place of what stood there. The map, with its links to all turns, stays. */
function replaceAround(map, strips) {
  for (const part of strips.querySelectorAll("[data-part]")) map.querySelector(`[data-part="${part.dataset.part}"]`).replaceWith(part);
  // Without this, Chromium computes the layout of what is removed, because it holds the focus.
  document.activeElement?.blur();
  const children = [...strips.parentElement.children];
  const at = children.indexOf(strips);
  for (const child of [...map.parentElement.children]) if (child !== map) child.remove();
  map.before(...children.slice(0, at));
  map.after(...children.slice(at + 1));
  map.parentElement.removeAttribute("aria-busy");
}

/** Put the reader of `url` in place of this one, or all but its map. Resolves to true when it stands there. */
export async function swapReader(url, { push = true, part = "reader" } = {}) {
  const mine = ++asked;
  const target = new URL(url, location.href);
  const wanted = new URL(location.href).searchParams.get("find");
  if (wanted && push) target.searchParams.set("find", wanted);
  if (push) keepPlace();
  document.getElementById("reader").setAttribute("aria-busy", "true");
  let answer;
  let html;
  try {
    answer = await fetch(target, { headers: { "HX-Request": "true", "HX-Target": part } });
    html = await answer.text();
  } catch {
    answer = null;
  }
  if (mine !== asked) return false;
  if (!answer?.ok || answer.redirected) {
    location.assign(target);
    return false;
  }
  // Not a template: its elements belong to another document, and each would be moved to this one.
  const made = document.createElement("div");
  made.innerHTML = html;
  const reader = made.querySelector("#reader");
  if (part === "window") {
    const [map, strips] = [document.querySelector("#reader .strips"), reader.querySelector(".strips")];
    // Another row, view or lens: its map has other links.
    if (map.dataset.map !== strips.dataset.map) return swapReader(url, { push });
    replaceAround(map, strips);
  } else {
    document.getElementById("reader").replaceWith(reader);
  }
  // Only what asks for more: htmx would look at every attribute of every token.
  for (const element of document.querySelectorAll("#more [hx-get]")) window.htmx?.process(element);
  if (push) history.pushState({}, "", target);
  shown = pageOf(location.href);
  return true;
}

/** Whether the address names another window, lens or view than the one that stands there. */
export const isElsewhere = () => pageOf(location.href) !== shown;

/** The address changed without an exchange. */
export function noteAddress() {
  shown = pageOf(location.href);
}
