// Keys of the pages beside the token pane: differences, messages and siblings. Where a comparison is all of the page, its first
// difference is in view on arrival.

const sites = () => [...document.querySelectorAll("tr.site")];
let at = -1;
let lastG = -Infinity;

const messages = () => [...document.querySelectorAll(".chat")];

/** The message that has the focus, else the first in view. */
function messageHere() {
  const focused = document.activeElement?.closest(".chat");
  return focused ?? messages().find((one) => one.getBoundingClientRect().bottom > innerHeight / 4);
}

function goMessage(step) {
  const all = messages();
  const focused = document.activeElement?.closest(".chat");
  const next = all[focused ? all.indexOf(focused) + step : all.indexOf(messageHere())];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "start" });
}

/** The link to the tokens of a message, else of the last one before it that has such a link, else of the first. */
function tokensHere() {
  const all = [...document.querySelectorAll("a[data-tokens]")];
  const here = messageHere();
  const isUpTo = (link) => here.contains(link) || here.compareDocumentPosition(link) & Node.DOCUMENT_POSITION_PRECEDING;
  return here?.querySelector("a[data-tokens]") ?? (here && all.findLast(isUpTo)) ?? all[0];
}

function go(step) {
  const all = sites();
  if (!all.length) return;
  at = at < 0 ? (step > 0 ? 0 : all.length - 1) : (at + step + all.length) % all.length;
  show(all[at]);
  say(`difference ${all[at].id.slice("site-".length)} of ${all[at].closest("table").dataset.sites}`);
}

function show(site) {
  for (const other of document.querySelectorAll("tr.first")) other.classList.remove("first");
  site.classList.add("first");
  site.scrollIntoView({ block: "center" });
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select") || document.querySelector("dialog[open]")) return;
  // `g r`, `g n`, `g i` and `g s` belong to every page.
  const follows = event.timeStamp - lastG < 1200 && "rnis".includes(event.key);
  lastG = event.key === "g" ? event.timeStamp : -Infinity;
  if (follows) return;
  const action = {
    n: () => go(1),
    p: () => go(-1),
    j: () => goMessage(1),
    k: () => goMessage(-1),
    c: () => tokensHere()?.click(),
    h: () => document.querySelector("[data-go=sibling-previous]")?.click(),
    l: () => document.querySelector("[data-go=sibling-next]")?.click(),
    s: () => document.querySelector("[data-seen]")?.click(),
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

// The keys go on from the message that one came for.
if (location.hash === "#here") document.getElementById("here")?.focus({ preventScroll: true });

const named = location.hash.startsWith("#site-") ? document.getElementById(location.hash.slice(1)) : null;
// A page on which the comparison is not the first thing stays where it is.
const first = named ?? (document.querySelector(".side-by-side[data-stay]") ? null : sites()[0]);
if (first) {
  at = sites().indexOf(first);
  const box = first.getBoundingClientRect();
  if (box.bottom > innerHeight || box.top < 0) show(first);
}
