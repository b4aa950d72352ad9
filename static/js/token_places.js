// Which token is where: row offsets of elements, the selected range, links to it, exact copies.

export const pane = () => document.getElementById("pane");
export const isTokenView = () => pane()?.dataset.view === "tokens";

const blocks = () => [...(pane()?.querySelectorAll(".blk") ?? [])];
const blockAt = (offset) => blocks().find((box) => Number(box.dataset.a) <= offset && offset < Number(box.dataset.b));

/** The row offset of a token's element. The tokens of a block are its children, so nothing is kept for each of them. */
export function offsetOf(element) {
  const box = isTokenView() ? element?.parentElement : null;
  return box?.matches("#pane .blk") ? Number(box.dataset.a) + [...box.children].indexOf(element) : undefined;
}

export function elementAt(offset) {
  const box = isTokenView() ? blockAt(offset) : null;
  return box?.children[offset - Number(box.dataset.a)];
}

/** The run that holds a row offset, in the run view. */
export function runAt(offset) {
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
export function select(next, keepAddress = false) {
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
