// The trajectory page: keys, panel, selection, pointer and live parts. Without it every page still reads: all of it is links
// and forms. One file, because all of it is needed at once and each file is a request. `say`, `announce`, `copyText` and
// `serverAway` are of the shell, app.js.

// === which token is where: row offsets of elements, the selected range, links to it, exact copies ====================
const pane = () => document.getElementById("pane");
const isTokenView = () => pane()?.dataset.view === "tokens";

const blocks = () => [...(pane()?.querySelectorAll(".blk") ?? [])];
const blockAt = (offset) => blocks().find((box) => Number(box.dataset.a) <= offset && offset < Number(box.dataset.b));

/** The row offset of a token's element. The tokens of a block are its children, so nothing is kept for each of them. */
function offsetOf(element) {
  const box = isTokenView() ? element?.parentElement : null;
  return box?.matches("#pane .blk") ? Number(box.dataset.a) + [...box.children].indexOf(element) : undefined;
}

function elementAt(offset) {
  const box = isTokenView() ? blockAt(offset) : null;
  return box?.children[offset - Number(box.dataset.a)];
}

/** The run that holds a row offset, in the run view. */
function runAt(offset) {
  return [...(blockAt(offset)?.querySelectorAll("span[data-a]") ?? [])].findLast((run) => Number(run.dataset.a) <= offset) ?? null;
}

/** The elements of the tokens [start, stop) that are drawn. */
function tokensIn([start, stop]) {
  return blocks().flatMap((box) => {
    const a = Number(box.dataset.a);
    return stop > a && start < Number(box.dataset.b) ? [...box.children].slice(Math.max(start - a, 0), stop - a) : [];
  });
}

let range = null;

/** Select tokens [start, stop); null clears. The address follows, so that a reload shows the same. */
function select(next, keepAddress = false) {
  for (const element of pane().querySelectorAll(".sel, .at")) element.classList.remove("sel", "at");
  range = next;
  if (range && isTokenView()) {
    for (const token of tokensIn(range)) token.classList.add("sel");
  } else if (range) {
    // The runs that begin in the range; the one that it begins in is lit up by `lightUp`.
    for (const run of pane().querySelectorAll(".toks span[data-a]")) {
      const at = Number(run.dataset.a);
      if (at >= range[1]) break;
      if (at >= range[0]) run.classList.add("sel");
    }
  }
  document.dispatchEvent(new CustomEvent("tokens:selected"));
  if (!keepAddress) history.replaceState(history.state, "", address());
  // The Share button's link opens what is selected.
  const shared = document.querySelector(".share input[name=query]");
  if (shared) shared.value = new URL(address()).search.slice(1);
}

/** Put a frame around the element where a range begins. */
function lightUp(element) {
  for (const other of document.querySelectorAll(".toks .at")) other.classList.remove("at");
  element.classList.add("at");
}

const selected = () => range;

/** The address of what is selected, or of the page as it is. */
function address(chosen = range) {
  const url = new URL(location.href);
  url.hash = "";
  if (chosen) url.searchParams.set("t", `${chosen[0]}-${chosen[1]}`);
  return url.toString();
}

/** In the run view: the tokens that a text selection touches, by the runs it starts and ends in. */
function textSelectionRange() {
  const selection = getSelection();
  if (!selection || selection.isCollapsed || !pane()?.contains(selection.anchorNode)) return null;
  const drawn = selection.getRangeAt(0);
  if (isTokenView()) {
    const tokens = blocks().filter((box) => drawn.intersectsNode(box)).flatMap((box) => [...box.children]);
    const touched = tokens.filter((token) => drawn.intersectsNode(token));
    return touched.length ? [offsetOf(touched[0]), offsetOf(touched.at(-1)) + 1] : null;
  }
  const runs = [...pane().querySelectorAll(".toks span[data-a]")].filter((run) => drawn.intersectsNode(run));
  if (!runs.length) return null;
  const last = runs[runs.length - 1];
  const box = last.closest(".blk");
  const after = last.nextElementSibling;
  return [Number(runs[0].dataset.a), after ? Number(after.dataset.a) : Number(box.dataset.b)];
}

/** Text of a selection as it was sampled: token panes only, no headers, no line breaks of the page's own. */
function exactText(selection) {
  let text = "";
  for (let i = 0; i < selection.rangeCount; i += 1) {
    const drawn = selection.getRangeAt(i);
    const root = drawn.commonAncestorContainer;
    if (root.nodeType === Node.TEXT_NODE) return root.data.slice(drawn.startOffset, drawn.endOffset);
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (!drawn.intersectsNode(node) || !node.parentElement.closest(".toks")) continue;
      const from = node === drawn.startContainer ? drawn.startOffset : 0;
      const to = node === drawn.endContainer ? drawn.endOffset : node.data.length;
      text += node.data.slice(from, to);
    }
  }
  return text;
}

// === a group of links or buttons is one stop of the Tab key; arrows go on inside it ==================================
const ITEMS = "a[href], button:not([disabled])";

function stopAt(group, item) {
  for (const other of group.querySelectorAll(ITEMS)) other.tabIndex = other === item ? 0 : -1;
}

/** Make each of the groups one stop: at its current item, else at its first. */
function makeRoving(groups) {
  for (const group of groups) {
    group.dataset.roving = "";
    const items = [...group.querySelectorAll(ITEMS)];
    stopAt(group, items.find((item) => item.hasAttribute("aria-current")) ?? items[0]);
  }
}

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

/** Moves the focus inside a group; true when the key did. */
function roveBy(event) {
  const group = event.target.closest?.("[data-roving]");
  if (!group || event.target.matches("input, textarea, select")) return false;
  const items = [...group.querySelectorAll(ITEMS)].filter((item) => item.getClientRects().length);
  const now = items.indexOf(event.target);
  if (now < 0) return false;
  let next = null;
  if (event.key in STEPS) next = items[now + STEPS[event.key]] ?? null;
  else if (event.key === "Home") next = items[0];
  else if (event.key === "End") next = items.at(-1);
  else return false;
  if (next) {
    stopAt(group, next);
    next.focus();
  }
  return true;
}


// === what of the row is in view, and the exchange of the reader for another window, lens or view =====================
const WINDOW = 4096;

/** The line below the bars that stick to the top of the window. */
function headLine() {
  return (document.querySelector(".reader-bar")?.getBoundingClientRect().bottom ?? 0) + 4;
}

function shareOf(run) {
  const next = run.nextElementSibling?.dataset.a ?? run.closest(".blk").dataset.b;
  return Number(next) - Number(run.dataset.a);
}

const isSeen = (box) => box.bottom > headLine() && box.top < innerHeight;

/** The row offset that the reader looks at, and how far down the window it stands. */
function placeInView() {
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
function showPlace(place, again = 3) {
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
let shownPage = pageOf(location.href);
let nSwaps = 0;

/** Keep the place in the history's entry, so that Back returns to it. */
function keepPlace() {
  const place = pane() && placeInView();
  if (place) history.replaceState({ ...history.state, place }, "");
}

/** The address of the token that is in view, in the given view. */
function addressInView(url, place) {
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
  document.getElementById("reader").removeAttribute("aria-busy");
}

const AWAY = [502, 503, 504];
const LONGEST_PAUSE = 30000;

/** The answer to a request. While the server is away it is asked again, with growing pauses; null when nobody waits for it. */
async function fetchPatiently(url, options, isWanted = () => true) {
  for (let pause = 1000; isWanted(); pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    const answer = await fetch(url, options).catch(() => null);
    if (answer && !AWAY.includes(answer.status)) {
      serverAway(false);
      return answer;
    }
    serverAway(true);
    const asked = 1000 * Number(answer?.headers.get("Retry-After") ?? 0) || 0;
    await new Promise((go) => { setTimeout(go, Math.min(Math.max(pause, asked), LONGEST_PAUSE)); });
  }
  return null;
}

/** Put the reader of `url` in place of this one, or all but its map. Resolves to true when it stands there. */
async function swapReader(url, { push = true, part = "reader" } = {}) {
  const mine = ++nSwaps;
  const target = new URL(url, location.href);
  const wanted = new URL(location.href).searchParams.get("find");
  if (wanted && push) target.searchParams.set("find", wanted);
  if (push) keepPlace();
  document.getElementById("reader").setAttribute("aria-busy", "true");
  const answer = await fetchPatiently(target, { headers: { "HX-Request": "true", "HX-Target": part } }, () => mine === nSwaps);
  const html = await answer?.text().catch(() => null);
  if (mine !== nSwaps) return false;
  if (!answer?.ok || answer.redirected || html === null) {
    location.assign(target);
    return false;
  }
  // Not a template: its elements belong to another document, and each would be moved to this one.
  const holder = document.createElement("div");
  holder.innerHTML = html;
  const reader = holder.querySelector("#reader");
  if (part === "window") {
    const [map, strips] = [document.querySelector("#reader .strips"), reader.querySelector(".strips")];
    // Another row, view or lens: its map has other links.
    if (map.dataset.map !== strips.dataset.map) return swapReader(url, { push });
    replaceAround(map, strips);
    document.querySelector("#reader .reader-bar").replaceWith(reader.querySelector(".reader-bar"));
    document.getElementById("reader").removeAttribute("data-split-open");
  } else {
    document.getElementById("reader").replaceWith(reader);
  }
  showRecentLenses();
  // Only what asks for more: htmx would look at every attribute of every token.
  for (const element of document.querySelectorAll("#more [hx-get]")) window.htmx?.process(element);
  if (push) history.pushState({}, "", target);
  shownPage = pageOf(location.href);
  return true;
}

/** Whether the address names another window, lens or view than the one that stands there. */
const isElsewhere = () => pageOf(location.href) !== shownPage;

/** The address changed without an exchange. */
function noteAddress() {
  shownPage = pageOf(location.href);
}


// === the lens: at once where the style sheet can do it, else the server draws the reader again =======================
const lensLinks = () => [...document.querySelectorAll("a[data-lens-choice]")];
const lensLink = (lens) => lensLinks().find((link) => link.dataset.lensChoice === lens);
const N_RECENT = 3;

/** The lenses used last, as buttons, where the bar has room for them. */
function showRecentLenses() {
  const box = document.querySelector(".lens-recent");
  if (!box) return;
  const now = lensLinks().find((link) => link.hasAttribute("aria-current"))?.dataset.lensChoice;
  const names = [...(stored("lenses") ?? "").split("|"), "mask", "origin", "logprob"].filter(lensLink);
  // In the order of the menu, so that a button stays where it is.
  const recent = lensLinks().filter((link) => [...new Set(names)].slice(0, N_RECENT).includes(link.dataset.lensChoice));
  box.replaceChildren(...recent.map((link) => {
    const button = made("button", link.textContent.trim());
    button.type = "button";
    button.dataset.lensRecent = link.dataset.lensChoice;
    button.setAttribute("aria-pressed", String(link.dataset.lensChoice === now));
    return button;
  }));
  box.hidden = false;
}

/** Whether the server must draw this lens, or must draw what the present one split. */
function needsRequest(link) {
  const now = lensLinks().find((other) => other.hasAttribute("aria-current"));
  const when = [now, link].map((lens) => lens?.dataset.lensRequest || "always");
  return when.includes("always") || (!isTokenView() && when.includes("runs"));
}

/** `swap(url)` exchanges the reader and keeps the place. */
function setLens(link, swap) {
  if (!link) return undefined;
  const lens = link.dataset.lensChoice;
  const url = new URL(location.href);
  if (lens === "mask") url.searchParams.delete("lens"); else url.searchParams.set("lens", lens);
  say(`lens: ${link.textContent.trim()}`);
  store("lenses", [...new Set([lens, ...(stored("lenses") ?? "").split("|")])].filter(Boolean).slice(0, N_RECENT).join("|"));
  link.closest("details").open = false;
  if (needsRequest(link)) return swap(url);
  document.getElementById("reader").dataset.lens = lens;
  pane().dataset.lens = lens;
  for (const other of document.querySelectorAll("[data-for]")) other.hidden = other.dataset.for !== lens;
  for (const other of lensLinks()) {
    if (other === link) other.setAttribute("aria-current", "true"); else other.removeAttribute("aria-current");
  }
  document.querySelector("[data-lens-name]").textContent = link.textContent.trim();
  showRecentLenses();
  history.replaceState(history.state, "", url);
  noteAddress();
  return keepLens(lens);
}

/** Links that keep the lens follow it; those to other trajectories keep the view as well. */
function keepLens(lens) {
  for (const other of document.querySelectorAll("a[data-keeps-lens]")) {
    const target = new URL(other.href);
    if (lens === "mask") target.searchParams.delete("lens"); else target.searchParams.set("lens", lens);
    if (other.dataset.go?.startsWith("sibling")) {
      if (isTokenView()) target.searchParams.set("view", "tokens"); else target.searchParams.delete("view");
    }
    other.href = target.pathname + target.search + target.hash;
  }
}

function nextLens(swap) {
  const all = lensLinks();
  const now = all.findIndex((link) => link.hasAttribute("aria-current"));
  return setLens(all[(now + 1) % all.length], swap);
}

const chosenLens = () => new URL(location.href).searchParams.get("lens") ?? "mask";


// === moves over the row: turns, one turn alone, findings, both ends ==================================================
const heads = () => [...document.querySelectorAll("#pane .turn-head")];
const isSolo = () => pane()?.hasAttribute("data-solo") ?? false;

// The turn that j and k reached: near the end of a page a turn cannot be scrolled to the top. A scroll by hand forgets it.
let turnAt = null;
for (const name of ["wheel", "touchmove", "pointerdown"]) {
  document.addEventListener(name, () => { turnAt = null; }, { passive: true });
}
function forgetTurn() {
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
function goTurn(step, leave) {
  const all = heads();
  if (!all.length) return;
  const current = currentTurn(all);
  const onTop = turnAt !== null || isSolo() || current < 0 || all[current].parentElement.getBoundingClientRect().top >= headLine() - 6;
  const next = step > 0 || onTop ? current + step : current;
  if (next >= 0 && next < all.length) openTurn(all, next);
  else leave(step > 0 ? "next" : "previous");
}

function toggleSolo() {
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
function leaveSolo() {
  if (!isSolo()) return false;
  toggleSolo();
  return true;
}

function goToEnd(first) {
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

function goFinding(step) {
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

function mark(link) {
  const all = findings();
  findingAt = all.indexOf(link);
  all.forEach((other) => other.removeAttribute("aria-current"));
  link.setAttribute("aria-current", "true");
  openTab("findings");
  showInPanel(link.closest(".finding") ?? link);
  if (!link.matches(".finding-head")) showInPanel(link);
  say(`finding ${findingAt + 1} of ${all.length}`);
}

function openFinding(link) {
  mark(findings().includes(link) ? link : link.closest(".finding").querySelector("a.finding-jump[aria-current], a.finding-jump"));
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
function arriveAtFinding() {
  findingAt = -1;
  const link = findings().find((other) => other.getAttribute("aria-current") === "true");
  if (link) mark(link);
}


// === find in the whole row: the server names the tokens of every place, the page selects the text itself =============
let foundText = { wanted: "", url: "" };
let foundAt = -1;
let findRequest = null;

async function placesOf(wanted) {
  const url = pane().dataset.find;
  if (foundText.wanted === wanted && foundText.url === url) return foundText;
  findRequest?.abort();
  findRequest = new AbortController();
  const answer = await fetch(`${url}&q=${encodeURIComponent(wanted)}`, { signal: findRequest.signal });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  foundText = { ...(await answer.json()), wanted, url };
  foundAt = -1;
  return foundText;
}

/** Text nodes from one element up to and with another. */
function textNodes(first, last) {
  const nodes = [];
  const walker = document.createTreeWalker(pane(), NodeFilter.SHOW_TEXT);
  walker.currentNode = first;
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!last.contains(node) && last.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING) break;
    if (node.parentElement.closest(".toks")) nodes.push(node);
  }
  return nodes;
}

function ends(nodes, position) {
  let left = position;
  for (const node of nodes) {
    if (left <= node.data.length) return [node, left];
    left -= node.data.length;
  }
  return null;
}

const holder = (offset) => (isTokenView() ? elementAt(offset) : runAt(offset));

/** Select the text of a place, which must be drawn; false where it is not. */
function selectText(place) {
  const first = holder(place[0]);
  const last = holder(place[1] - 1);
  if (!first || !last) return false;
  const nodes = textNodes(first, last);
  const text = nodes.map((node) => node.data).join("").toLowerCase();
  const needle = foundText.wanted.toLowerCase();
  // A run may hold the text more than once: the places before this one in the same element are counted.
  const begins = isTokenView() ? place[0] : Number(first.dataset.a);
  let left = foundText.places.slice(0, foundAt).filter((other) => other[0] >= begins).length;
  let position = text.indexOf(needle);
  while (left > 0 && position >= 0) {
    position = text.indexOf(needle, position + needle.length);
    left -= 1;
  }
  if (position < 0) return false;
  const drawn = document.createRange();
  drawn.setStart(...ends(nodes, position));
  drawn.setEnd(...ends(nodes, position + needle.length));
  const selection = getSelection();
  selection.removeAllRanges();
  selection.addRange(drawn);
  drawn.startContainer.parentElement.scrollIntoView({ block: "center" });
  return true;
}

/**
 * Go to the next, or the previous, place of a text; resolves to a sentence that says where one is.
 * `open(offset)` puts another window in place and resolves when it stands there. `from`: the offset in view.
 */
async function find(wanted, backwards, from, open) {
  if (!wanted) return "";
  let found;
  try {
    found = await placesOf(wanted);
  } catch (error) {
    return error.name === "AbortError" ? "" : "the server does not answer";
  }
  if (found.missing) return "nothing to search";
  const n = found.places.length;
  if (!n) return "not in this row";
  if (foundAt < 0) {
    const next = found.places.findIndex(([start]) => start >= from);
    foundAt = backwards ? (next <= 0 ? n : next) - 1 : Math.max(next, 0);
  } else {
    foundAt = (foundAt + (backwards ? n - 1 : 1)) % n;
  }
  const [start] = found.places[foundAt];
  if (start < Number(pane().dataset.a) || start >= Number(pane().dataset.b) || !holder(start)) await open(start);
  selectText(found.places[foundAt]);
  const more = found.n > n ? `, the first ${n.toLocaleString("en-US")} can be opened` : "";
  return `${foundAt + 1} of ${found.n.toLocaleString("en-US")}${more}`;
}


// === the panel =======================================================================================================
// Findings, token, turns, lanes and comments, of which one is open. A list that the script never met follows one another.
const panel = () => document.getElementById("panel");
const tabs = () => [...document.querySelectorAll(".panel-tabs [role=tab]")];
const isBelow = () => matchMedia("(max-width: 62rem)").matches || document.documentElement.dataset.panel === "below";
let tabAt = "findings";

const isTabOpen = (name) => tabAt === name && !(isBelow() && panel()?.dataset.folded === "true");

/** Open a tab of the panel; false where it has no such tab. */
function openTab(name) {
  const tab = tabs().find((other) => other.getAttribute("aria-controls") === name);
  if (!tab) return false;
  tabAt = name;
  for (const other of tabs()) {
    const isOpen = other === tab;
    other.setAttribute("aria-selected", String(isOpen));
    other.tabIndex = isOpen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls"))?.toggleAttribute("data-open", isOpen);
  }
  panel().dataset.folded = "false";
  return true;
}

/** Open the tab that holds what the address names behind its #, and show it. */
function openNamed(hash) {
  const element = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
  const section = element && element.closest(".panel-section");
  if (!section) return;
  openTab(section.id);
  for (let fold = element.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  showInPanel(element);
}

/** Scroll what scrolls in the panel, and not the page, until the element is in view, its head at the top where it is tall. */
function showInPanel(element) {
  for (let list = element.parentElement; list?.closest("#panel"); list = list.parentElement) {
    if (list.scrollHeight <= list.clientHeight + 1 || !/auto|scroll/.test(getComputedStyle(list).overflowY)) continue;
    const box = element.getBoundingClientRect();
    const frame = list.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom) list.scrollTop += box.top - frame.top - 6;
  }
}

const stored = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* a private window forgets it */ } };

/** The size of the panel, in percent of the window. */
function sizePanel(percent) {
  const size = Math.min(Math.max(Math.round(percent), 15), 60);
  document.documentElement.style.setProperty(isBelow() ? "--panel-tall" : "--panel-wide", `${size}${isBelow() ? "vh" : "vw"}`);
  panel()?.querySelector(".panel-grip").setAttribute("aria-valuenow", String(size));
  store(isBelow() ? "panel-tall" : "panel-wide", String(size));
}

function arrangePanel() {
  if (!panel()) return;
  const root = document.documentElement;
  if (stored("panel-side") === "below") root.dataset.panel = "below"; else delete root.dataset.panel;
  for (const [name, unit] of [["panel-wide", "vw"], ["panel-tall", "vh"]]) {
    if (/^\d\d$/.test(stored(name) ?? "")) root.style.setProperty(`--${name}`, `${stored(name)}${unit}`);
  }
  const grip = panel().querySelector(".panel-grip");
  grip.hidden = false;
  grip.setAttribute("aria-orientation", isBelow() ? "horizontal" : "vertical");
  grip.setAttribute("aria-valuenow", stored(isBelow() ? "panel-tall" : "panel-wide") ?? (isBelow() ? "38" : "27"));
  panel().querySelector("[data-panel-side]").setAttribute("aria-pressed", String(root.dataset.panel === "below"));
  // On a small window the tokens come first: the panel is its line of tabs until it is asked.
  panel().dataset.folded ??= String(matchMedia("(max-width: 62rem)").matches);
}

document.addEventListener("click", (event) => {
  const tab = event.target.closest?.(".panel-tabs [role=tab]");
  if (tab) {
    const isSame = isTabOpen(tab.getAttribute("aria-controls"));
    openTab(tab.getAttribute("aria-controls"));
    if (isSame && isBelow()) panel().dataset.folded = "true";
  } else if (event.target.closest?.("[data-panel-side]")) {
    store("panel-side", document.documentElement.dataset.panel === "below" ? "right" : "below");
    arrangePanel();
  }
});

document.addEventListener("keydown", (event) => {
  const tab = event.target.closest?.(".panel-tabs [role=tab]");
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (tab && step) {
    const all = tabs();
    const next = all[(all.indexOf(tab) + step + all.length) % all.length];
    openTab(next.getAttribute("aria-controls"));
    next.focus();
    event.preventDefault();
  }
  const grip = event.target.closest?.(".panel-grip");
  const grows = { ArrowLeft: 1, ArrowUp: 1, ArrowRight: -1, ArrowDown: -1 }[event.key];
  if (grip && grows) {
    sizePanel(Number(grip.getAttribute("aria-valuenow")) + 2 * grows);
    event.preventDefault();
  }
});

document.addEventListener("pointerdown", (event) => {
  const grip = event.target.closest?.(".panel-grip");
  if (!grip || event.button) return;
  event.preventDefault();
  grip.setPointerCapture(event.pointerId);
  const move = (to) => sizePanel(isBelow() ? 100 * (1 - to.clientY / innerHeight) : 100 * (1 - to.clientX / innerWidth));
  grip.addEventListener("pointermove", move);
  grip.addEventListener("lostpointercapture", () => grip.removeEventListener("pointermove", move), { once: true });
});
addEventListener("hashchange", () => openNamed(location.hash));

// A menu closes when the pointer goes on elsewhere, and one opens at a time.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

// --- a finding for a chat or an issue --------------------------------------------------------------------------------
document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy-markdown]");
  if (!button) return;
  const text = document.getElementById(button.dataset.copyMarkdown).value;
  const link = text.lastIndexOf("](/") + 2;
  await copyText(text.slice(0, link) + location.origin + text.slice(link));
  say("finding copied as Markdown");
});

// --- sampled and trained, side by side -------------------------------------------------------------------------------
/** Put the comparison of an address of *Side by side* in place of the tokens. */
async function openSplit(url) {
  const answer = await fetchPatiently(url, { headers: { Accept: "text/html" } });
  if (!answer?.ok) return location.assign(url);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const box = made("div", "", "split");
  box.id = "split";
  box.dataset.at = url;
  const [title, words, table, none] = [".pair-title", ".pair-title + .intro", "#side-by-side", ".notice"].map((css) => page.querySelector(css));
  if (title) title.id = "split-title";
  box.append(...[title, words, table ?? none].filter(Boolean).map((element) => document.adoptNode(element)));
  // A link to other folds or differences stays here; one to tokens leaves the split view.
  for (const link of box.querySelectorAll("a[href^='?']")) link.href = new URL(link.getAttribute("href"), new URL(url, location.href)).href;
  document.getElementById("split")?.remove();
  pane().before(box);
  document.getElementById("reader").toggleAttribute("data-split-open", true);
  document.querySelector("a[data-split]")?.setAttribute("aria-current", "true");
  box.tabIndex = -1;
  box.querySelector("tr.site")?.scrollIntoView({ block: "center" });
  box.focus({ preventScroll: true });
  say(words?.querySelector("strong")?.textContent.trim() || "sampled and trained, side by side");
  return undefined;
}

const isSplit = () => Boolean(document.getElementById("split"));

function closeSplit() {
  document.getElementById("split")?.remove();
  document.getElementById("reader").removeAttribute("data-split-open");
  const link = document.querySelector("a[data-split]");
  link?.removeAttribute("aria-current");
  say("the tokens of the row");
}

function toggleSplit() {
  const link = document.querySelector("a[data-split]");
  if (isSplit()) { closeSplit(); focusPane(); } else if (link) openSplit(link.href);
}

let siteAt = -1;
/** The next difference of the split view. */
function goSite(step) {
  const sites = [...document.querySelectorAll("#split tr.site")];
  if (!sites.length) return say("no difference");
  siteAt = (siteAt + step + sites.length) % sites.length;
  for (const site of sites) site.classList.toggle("first", site === sites[siteAt]);
  sites[siteAt].scrollIntoView({ block: "center" });
  return say(`difference ${siteAt + 1} of ${sites.length}`);
}

// === the token of the panel ==========================================================================================
// The token of the panel: every field, byte-true, from the columns of the window. Text goes in as text, never as HTML.
const SVG = "http://www.w3.org/2000/svg";
const MAX_TEXT = 24;
const count = (value) => value.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

let cardData = null;
let loading = null;
let pinned = false;
let shownToken = null;

/** Forget the window's data: another window was swapped in. */
function resetCard() {
  cardData = null;
  loading = null;
  closeCard();
}

function loadCards() {
  loading ??= fetch(pane().dataset.card, { headers: { Accept: "application/json" } })
    .then((response) => {
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      return response.json();
    })
    .then((body) => { cardData = body; });
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
function tokenAt(offset) {
  const at = offset - (cardData?.start ?? 0);
  if (!cardData || at < 0 || at >= cardData.ids.length) return null;
  const id = cardData.ids[at];
  const hex = cardData.bytes[id] ?? null;
  const [, origin, trained] = entryAt(cardData.runs, offset);
  const [start, stop, number, role, step, part] = entryAt(cardData.turns, offset) ?? [];
  const logprob = cardData.logprobs?.[at] ?? null;
  return {
    id,
    bytes: hex,
    text: hex === null ? null : decoded(hex),
    special: cardData.special.includes(id),
    origin,
    loss_mask: trained,
    logprob: logprob === null ? null : logprob / 1e4,
    turn: number === undefined ? null : `turn ${number} · ${role}`,
    step_place: (step ?? null) === null ? null
      : `step ${step}, ${PARTS[part] ?? part} ${count(offset - start)} of ${count(stop - start)}`,
    findings: cardData.findings.filter(([first, last]) => first <= offset && offset < last).map(([, , words]) => words),
    columns: Object.entries(cardData.columns).map(([name, values]) => [name, values[at]]),
  };
}

/** The columns of a window that holds the tokens [start, stop); null for more than a window. */
async function columnsOf(start, stop) {
  if (stop - start > WINDOW) return null;
  await loadCards();
  if (cardData.start <= start && stop <= cardData.stop) return cardData;
  const url = new URL(pane().dataset.card, location.href);
  url.searchParams.set("w", start);
  const answer = await fetch(url);
  return answer.ok ? answer.json() : null;
}

const card = () => document.getElementById("token-card");

/** What a screen reader says of the token that the keyboard reached. The card itself is silent: the pointer opens it too. */
function announceToken(offset) {
  const token = tokenAt(offset);
  if (!token) return;
  announce([
    token.text === null ? `id ${token.id}` : JSON.stringify(token.text), `token ${count(offset)}`, token.origin,
    token.loss_mask ? "trained" : "not trained",
    ...(token.logprob === null ? [] : [`log-probability ${token.logprob.toFixed(2)}`]), ...token.findings,
  ].join(", "));
}

function addField(list, name, value, className = "") {
  const term = document.createElement("dt");
  const definition = document.createElement("dd");
  term.textContent = name;
  definition.textContent = value;
  if (className) definition.className = className;
  list.append(term, definition);
}

function fillCard(offset) {
  const box = card();
  const list = box.querySelector("dl");
  list.replaceChildren();
  const token = tokenAt(offset);
  box.querySelector(".card-title").textContent = `token ${count(offset)}`;
  if (!token) return;
  addField(list, "text", token.text === null ? (token.bytes === null ? "not known" : "part of a character") : JSON.stringify(token.text), "mono");
  addField(list, "id", String(token.id), "mono");
  addField(list, "bytes", token.bytes === null ? "not known: no tokenizer" : token.bytes.replace(/../g, "$& ").trim() || "none", "mono");
  addField(list, "origin", token.special ? `${token.origin}, control token` : token.origin);
  addField(list, "loss mask", token.loss_mask ? "1: under the gradient" : "0: not trained");
  if (token.logprob !== null) {
    addField(list, "logprob", `${token.logprob.toFixed(4)}  (p = ${probability(token.logprob)})`, "mono");
  } else if (cardData.alternatives.some(([start, stop, n]) => n && start <= offset && offset < stop)) {
    addField(list, "logprob", "none in this row; what its step told stands below");
  } else {
    addField(list, "logprob", token.origin === "sampled" ? "not recorded" : "none: not sampled");
  }
  for (const [name, value] of token.columns) addField(list, name, value === null ? "no value" : String(value), "mono");
  addField(list, "in the row", `${count(offset)} of ${count(cardData.n_tokens)}, row ${cardData.row}`);
  if (token.step_place !== null) addField(list, "step", token.step_place);
  if (token.turn !== null) addField(list, "message", token.turn);
  for (const finding of token.findings) addField(list, "finding", finding, "card-finding");
  drawAlternatives(box, offset);
  const onward = box.querySelector("[data-continue]");
  if (onward) onward.search = `?row=${cardData.row}&at=${offset}`;
}

/** Show a token in the panel; `pin` opens its tab and keeps it until Esc, `aloud` has it read out. */
async function showCard(element, pin = false, aloud = false) {
  if (!isTokenView() || !card()) return;
  const offset = offsetOf(element);
  if (offset === undefined || (pinned && !pin)) return;
  if (pin) openTab("token");
  else if (!aloud && !isTabOpen("token")) return;
  shownToken = element;
  pinned = pin;
  card().dataset.pinned = String(pin);
  try {
    await loadCards();
  } catch {
    loading = null;
    cardData = null;
  }
  if (shownToken !== element) return;
  fillCard(offset);
  card().hidden = false;
  if (aloud) announceToken(offset);
}

function closeCard() {
  pinned = false;
  shownToken = null;
  if (card()) card().hidden = true;
}

const cardIsPinned = () => pinned;

/** Fetch the window's fields when the browser has nothing better to do. */
function prepareCard() {
  if (!isTokenView() || !card()) return;
  (window.requestIdleCallback ?? setTimeout)(() => loadCards().catch(() => { loading = null; }));
}

// --- the tokens that could have stood there --------------------------------------------------------------------------
function made(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** The probability of a log-probability, in words. */
function probability(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.001 ? `${(p * 100).toFixed(p > 0.1 ? 1 : 2)} %` : p.toExponential(1);
}

/** A share from 0 to 1 as a bar. The number beside it says the same. */
function shareBar(share) {
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

function tokenWords(token) {
  if (token.text === null) return token.bytes === null ? "not known" : `bytes ${token.bytes}`;
  const cut = [...token.text];
  return JSON.stringify(cut.length > MAX_TEXT ? `${cut.slice(0, MAX_TEXT).join("")}…` : token.text);
}

function alternativeRow(rank, token, isSampled) {
  const line = made("tr", "", isSampled ? "sampled" : "");
  const head = made("th", rank);
  head.scope = "row";
  const text = made("td", "", "mono");
  text.append(made("bdi", tokenWords(token)), ...(isSampled ? [made("strong", " ← sampled")] : []));
  const share = made("td", `${probability(token.logprob)} `);
  share.append(shareBar(Math.exp(token.logprob)));
  line.append(head, text, made("td", String(token.id), "mono"), share, made("td", token.logprob.toFixed(4), "mono"));
  return line;
}

function alternativesSummary(told) {
  const sampled = told.rank ? `the sampled token is number ${told.rank}` : "the sampled token is not among them";
  return `${plural(told.alternatives.length, "likeliest token")} here: ${sampled}`;
}

function alternativesTable(told) {
  const table = made("table");
  table.append(made("caption", alternativesSummary(told)));
  const head = made("tr");
  for (const name of ["#", "text", "id", "probability", "logprob"]) {
    const cell = made("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const first = made("thead");
  first.append(head);
  const body = made("tbody");
  told.alternatives.forEach((token, at) => body.append(alternativeRow(String(at + 1), token, at + 1 === told.rank)));
  if (!told.rank && told.sampled) body.append(alternativeRow(`>${told.alternatives.length}`, told.sampled, true));
  table.append(first, body);
  return table;
}

/** The entropy, or the least that it can be, where it is not among the fields of the card. */
function entropyWords(told) {
  if (told.entropy !== null) return "entropy" in cardData.columns ? [] : [made("p", `entropy ${told.entropy.toFixed(3)} nats`, "card-hint")];
  if (told.entropy_at_least === null) return [];
  return [made("p", `entropy at least ${told.entropy_at_least.toFixed(3)} nats: the engine told no more`, "card-hint")];
}

const MAX_KEPT_SHOWN = 100;

/** The tokens that top_p, top_k and min_p left, where they are stored. */
function keptWords(told) {
  if (!told.kept_tokens.length) return [];
  const words = told.kept_tokens.slice(0, MAX_KEPT_SHOWN).map((token) => `${tokenWords(token)} (${token.id})`).join(", ");
  const cut = told.kept_tokens.length > MAX_KEPT_SHOWN ? ", …" : "";
  const line = made("p", `sampling could draw from ${plural(told.kept_tokens.length, "token")}: `, "card-hint");
  line.append(made("bdi", words + cut, "mono"));
  return [line];
}

let nAlternatives = 0;

/** Fill the part of the card. Only a pinned token asks the server. */
async function drawAlternatives(box, offset) {
  const mine = ++nAlternatives;
  const part = box.querySelector(".card-alternatives");
  part.hidden = !cardData.alternatives.some(([start, stop]) => start <= offset && offset < stop);
  part.replaceChildren();
  if (part.hidden) return;
  if (!pinned) {
    part.append(made("p", "The engine told more here: press the token to see it.", "card-hint"));
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
  if (mine !== nAlternatives) return;
  if (!told || told.missing) {
    part.append(made("p", told ? told.missing : "The server does not answer. Press the token again.", "card-hint"));
    return;
  }
  if (told.alternatives.length) part.append(alternativesTable(told));
  part.append(...entropyWords(told), ...keptWords(told));
  announce(told.alternatives.length ? alternativesSummary(told) : part.textContent);
}

// === what is selected: its figures, and copies of it as text, ids, link and Python ===================================
let shownRange = null;

const selectionBox = () => document.getElementById("selection");

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
  const knownValues = values.filter((value) => value !== null);
  if (!knownValues.length) return null;
  return [knownValues.reduce((sum, value) => sum + value, 0) / knownValues.length, knownValues.length === all ? "" : ` over ${count(knownValues.length)}`];
}

/** Tokens, trained tokens, and the means over the tokens that have a log-probability or an entropy. */
function figures({ ids, mask, logprobs, entropy }) {
  const parts = [plural(ids.length, "token"), `${count(mask.filter(Boolean).length)} trained`];
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

async function showSelection(range) {
  const box = selectionBox();
  if (!box) return;
  shownRange = range;
  if (!range) {
    box.hidden = true;
    return;
  }
  const tokens = await tokensOf(range).catch(() => null);
  if (shownRange !== range) return;
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

document.addEventListener("tokens:selected", () => showSelection(selected()));

// A selection of text in the token view, once it rests.
let restingText = 0;
document.addEventListener("selectionchange", () => {
  clearTimeout(restingText);
  restingText = setTimeout(() => {
    if (!pane() || !isTokenView() || document.activeElement?.matches("input, textarea")) return;
    const range = textSelectionRange();
    if (range) showSelection(range);
    else if (!selected()) showSelection(null);
  }, 250);
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy-as]");
  if (!button || !shownRange) return;
  const how = button.dataset.copyAs;
  const tokens = how === "link" ? { start: shownRange[0], stop: shownRange[1] } : await tokensOf(shownRange).catch(() => null);
  if (!tokens) return say("the server does not answer");
  await copyText(COPIES[how](tokens));
  say(`${button.textContent.trim().toLowerCase()} of ${plural(shownRange[1] - shownRange[0], "token")} copied`);
});


// === a comment on what is selected ===================================================================================
const commentForm = () => document.getElementById("comment-form");

/** The range field follows the selection, until somebody types. */
function fillIn(range) {
  const box = commentForm();
  if (!box || !range || box.elements.text.value || !box.elements.t) return;
  box.elements.t.value = `${range[0]}-${range[1]}`;
  box.elements.row.value = pane().dataset.row;
}

/** Open the form at the selection, and type. */
function commentOn() {
  const box = commentForm();
  if (!box) return;
  fillIn(textSelectionRange() ?? selected());
  openTab("comments");
  box.closest("details").open = true;
  showInPanel(box);
  box.elements.text.focus({ preventScroll: true });
  const range = box.elements.t?.value;
  say(range ? `comment on tokens ${range}` : "comment on the trajectory");
}

document.addEventListener("tokens:selected", () => fillIn(selected()));
document.addEventListener("click", (event) => {
  if (event.target.closest?.("[data-comment]")) commentOn();
});


// === other windows, lenses, views; the selection; keys; the pointer; arrival =========================================
let anchor = null;
let firstG = -Infinity;

// --- other windows, lenses, views -------------------------------------------------------------------------------------
/** Another window: its first token, or its last turn, is in view and has the focus. */
async function openWindow(url, end = "start") {
  if (!(await swapReader(url, { part: "window" }))) return;
  arrive(false);
  if (end === "end") return goToEnd(false);
  pane().scrollIntoView({ block: "start" });
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
  await copyText(link);
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
  n: () => (isSplit() ? goSite(1) : goFinding(1)),
  p: () => (isSplit() ? goSite(-1) : goFinding(-1)),
  h: () => click("[data-go=sibling-previous]"),
  l: () => click("[data-go=sibling-next]"),
  "[": () => leaveWindow("previous"),
  "]": () => leaveWindow("next"),
  v: otherView,
  c: openConversation,
  m: () => nextLens(swapInPlace),
  f: toggleSolo,
  "/": () => document.querySelector("#find input")?.focus(),
  t: () => document.querySelector("#go-to input[name=t]")?.select(),
  d: toggleSplit,
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

/** Esc ends what lies over the page or is typed, else all that was chosen: the token, its range and the turn alone. */
function escape() {
  const typed = document.activeElement;
  const menu = document.querySelector("details.menu[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  } else if (typed?.matches("#reader input, #reader select")) {
    focusPane(placeInView()?.offset);
  } else if (typed?.matches("#panel textarea, #panel input, #panel select")) {
    typed.blur();
  } else if (isSplit()) {
    toggleSplit();
  } else {
    if (cardIsPinned() || selected()) {
      select(null, true);
      clearRange();
    }
    closeCard();
    leaveSolo();
    if (isBelow()) panel().dataset.folded = "true";
  }
}

document.addEventListener("keydown", (event) => {
  if (!pane() || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return escape();
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select, [contenteditable]")) return;
  if (event.target.closest?.(".panel-head, .panel-grip") && event.key.startsWith("Arrow")) return undefined;
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
  if (isSplit() && "jkvfG[]".includes(event.key)) closeSplit();
  return action();
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
  const isPlain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  const recent = event.target.closest?.("[data-lens-recent]");
  if (recent) return setLens(lensLink(recent.dataset.lensRecent), swapInPlace);
  const link = isPlain && event.target.closest?.(
    "a[data-lens-choice], a[data-view-choice], a[data-split], #split tr.fold a, #split a[rel=next], #reader a[data-go], a.skip-to-tokens",
  );
  if (link) {
    event.preventDefault();
    if (link.closest("#split")) openSplit(link.href);
    else if ("split" in link.dataset) toggleSplit();
    else if (link.dataset.lensChoice) setLens(link, swapInPlace);
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
  const sign = isPlain && event.target.closest?.("#pane .gap, a[href^='#finding'], a[href^='#comment']");
  if (sign && location.hash === new URL(sign.href).hash) openNamed(location.hash);
  const jump = event.target.closest?.("a.finding-jump, a.finding-head");
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

/** Blocks get their heights when they come near, so what is in the middle of the window may leave it again. */
function toMiddle(element, offset) {
  element.scrollIntoView({ block: "center" });
  showPlace({ offset, y: innerHeight / 2 }, 6);
}

// Each is one stop of the Tab key.
const GROUPS = ".switch, .outline ol, .tabs, .traj-moves, .lens-menu .menu-body";
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
  showRecentLenses();
  if (!moves) return;
  arrangePanel();
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
    toMiddle(marked, start);
    // Arrows go on from the token that was asked for.
    if (isTokenView()) marked.focus({ preventScroll: true });
  } else if (marked && !location.hash && marked.getBoundingClientRect().bottom > innerHeight) {
    // Without a place in the address the page is drawn at its worst finding.
    toMiddle(marked, offsetOf(marked) ?? Number(marked.dataset.a));
  }
  arriveAtFinding();
  if (asked && isTokenView() && !findings().some((link) => link.getAttribute("aria-current") === "true")) openTab("token");
  if (isBelow() && matchMedia("(max-width: 62rem)").matches) panel().dataset.folded = "true";
  openNamed(location.hash);
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

const isInUse = () => cardIsPinned() || selected() || !getSelection().isCollapsed || isSplit()
  || document.activeElement?.matches("#live textarea, #live input, #live select") || document.querySelector("#live details.menu[open]");

// A live page is not exchanged under a reader's hand: it does not ask, and an answer that comes too late is dropped.
for (const name of ["htmx:beforeRequest", "htmx:beforeSwap"]) {
  document.addEventListener(name, (event) => {
    if (event.target.id === "live" && isInUse()) event.preventDefault();
  });
}
let heldFocus = null;
let heldPanel = null;
document.addEventListener("htmx:beforeSwap", () => {
  heldFocus = focusedName();
  heldPanel = panel() && [panel().dataset.folded, panel().querySelector(".panel-body").scrollTop];
});
document.addEventListener("htmx:afterSettle", (event) => {
  // The next part of the run view, or a live page that grew: the reader stays where they are.
  if (!pane()) return;
  const parts = pane().querySelectorAll(".blk");
  if (parts.length) pane().dataset.b = parts[parts.length - 1].dataset.b;
  if ((event.detail.target?.id ?? event.target.id) !== "live") return;
  resetCard();
  arrangePanel();
  openTab(tabAt);
  if (heldPanel) [panel().dataset.folded, panel().querySelector(".panel-body").scrollTop] = heldPanel;
  showRecentLenses();
  makeRoving(document.querySelectorAll(GROUPS));
  if (isTokenView()) beReachable();
  prepareCard();
  if (heldFocus && document.activeElement === document.body && !focusAgain(heldFocus)) focusPane(heldFocus.offset);
});
arrive();

