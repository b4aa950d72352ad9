// Which token is where: row offsets of elements, the selected range, links to it, exact copies.

export const pane = () => document.getElementById("pane");
export const isTokenView = () => pane()?.dataset.view === "tokens";

let offsets = new WeakMap();
let elements = new Map();

/** Read the pane again: after a window was swapped in. */
export function reindex() {
  offsets = new WeakMap();
  elements = new Map();
  if (!isTokenView()) return;
  for (const box of pane().querySelectorAll(".toks")) {
    let at = Number(box.dataset.a);
    for (const token of box.children) {
      offsets.set(token, at);
      elements.set(at, token);
      at += 1;
    }
  }
}

export const offsetOf = (element) => offsets.get(element);
export const elementAt = (offset) => elements.get(offset);

/** The run that holds a row offset, in the run view. */
export function runAt(offset) {
  const holds = (box) => Number(box.dataset.a) <= offset && offset < Number(box.dataset.b);
  const block = [...pane().querySelectorAll(".blk")].find(holds);
  return [...(block?.querySelectorAll("span[data-a]") ?? [])].findLast((run) => Number(run.dataset.a) <= offset) ?? null;
}

let range = null;

/** Select tokens [start, stop); null clears. The address follows, so that a reload shows the same. */
export function select(next, keepAddress = false) {
  for (const element of pane().querySelectorAll(".sel, .at")) element.classList.remove("sel", "at");
  range = next;
  if (range && isTokenView()) {
    for (let at = range[0]; at < range[1]; at += 1) elements.get(at)?.classList.add("sel");
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
export function lightUp(element) {
  for (const other of document.querySelectorAll(".toks .at")) other.classList.remove("at");
  element.classList.add("at");
}

export const selected = () => range;

/** The address of what is selected, or of the page as it is. */
export function address(chosen = range) {
  const url = new URL(location.href);
  url.hash = "";
  if (chosen) url.searchParams.set("t", `${chosen[0]}-${chosen[1]}`);
  return url.toString();
}

/** In the run view: the tokens that a text selection touches, by the runs it starts and ends in. */
export function textSelectionRange() {
  const selection = getSelection();
  if (!selection || selection.isCollapsed || !pane()?.contains(selection.anchorNode)) return null;
  const drawn = selection.getRangeAt(0);
  if (isTokenView()) {
    const touched = [...elements].filter(([, element]) => drawn.intersectsNode(element)).map(([at]) => at);
    return touched.length ? [Math.min(...touched), Math.max(...touched) + 1] : null;
  }
  const runs = [...pane().querySelectorAll(".toks span[data-a]")].filter((run) => drawn.intersectsNode(run));
  if (!runs.length) return null;
  const last = runs[runs.length - 1];
  const box = last.closest(".blk");
  const after = last.nextElementSibling;
  return [Number(runs[0].dataset.a), after ? Number(after.dataset.a) : Number(box.dataset.b)];
}

/** Text of a selection as it was sampled: token panes only, no headers, no line breaks of the page's own. */
export function exactText(selection) {
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

/** Put text on the clipboard; also where the page is not served from localhost or over HTTPS. */
export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
