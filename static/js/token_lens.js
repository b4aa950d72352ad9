// The lens: at once where the style sheet can do it, else the server draws the reader again, at the same place.

import { isTokenView, pane } from "./token_places.js";
import { say } from "./status.js";
import { noteAddress } from "./token_view.js";

const lensLinks = () => [...document.querySelectorAll("a[data-lens-choice]")];
const lensLink = (lens) => lensLinks().find((link) => link.dataset.lensChoice === lens);

/** Whether the server must draw this lens, or must draw what the present one split. */
function needsRequest(link) {
  const now = lensLinks().find((other) => other.hasAttribute("aria-current"));
  const when = [now, link].map((one) => one?.dataset.lensRequest || "always");
  return when.includes("always") || (!isTokenView() && when.includes("runs"));
}

/** `swap(url)` exchanges the reader and keeps the place. */
export function setLens(link, swap) {
  if (!link) return undefined;
  const lens = link.dataset.lensChoice;
  const url = new URL(location.href);
  if (lens === "mask") url.searchParams.delete("lens"); else url.searchParams.set("lens", lens);
  say(`lens: ${link.textContent.trim()}`);
  if (needsRequest(link)) return swap(url);
  document.getElementById("reader").dataset.lens = lens;
  pane().dataset.lens = lens;
  for (const other of document.querySelectorAll("[data-for]")) other.hidden = other.dataset.for !== lens;
  for (const other of lensLinks()) {
    if (other === link) other.setAttribute("aria-current", "true"); else other.removeAttribute("aria-current");
  }
  history.replaceState(history.state, "", url);
  noteAddress();
  return keepLens(lens);
}

/** Links that keep the lens follow it; those to other trajectories keep the view as well. */
export function keepLens(lens) {
  for (const other of document.querySelectorAll("a[data-keeps-lens]")) {
    const target = new URL(other.href);
    if (lens === "mask") target.searchParams.delete("lens"); else target.searchParams.set("lens", lens);
    if (other.dataset.go?.startsWith("sibling")) {
      if (isTokenView()) target.searchParams.set("view", "tokens"); else target.searchParams.delete("view");
    }
    other.href = target.pathname + target.search + target.hash;
  }
}

export function nextLens(swap) {
  const all = lensLinks();
  const now = all.findIndex((link) => link.hasAttribute("aria-current"));
  return setLens(all[(now + 1) % all.length], swap);
}

export const chosenLens = () => new URL(location.href).searchParams.get("lens") ?? "mask";
