// Find in the whole row: the server names the tokens of every place, the page goes there and selects the text itself.

import { elementAt, isTokenView, pane, runAt } from "./token_places.js";

let known = { wanted: "", url: "" };
let at = -1;
let asked = null;

async function placesOf(wanted) {
  const url = pane().dataset.find;
  if (known.wanted === wanted && known.url === url) return known;
  asked?.abort();
  asked = new AbortController();
  const answer = await fetch(`${url}&q=${encodeURIComponent(wanted)}`, { signal: asked.signal });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  known = { ...(await answer.json()), wanted, url };
  at = -1;
  return known;
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
  const needle = known.wanted.toLowerCase();
  // A run may hold the text more than once: the places before this one in the same element are counted.
  const begins = isTokenView() ? place[0] : Number(first.dataset.a);
  let left = known.places.slice(0, at).filter((other) => other[0] >= begins).length;
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
export async function find(wanted, backwards, from, open) {
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
  if (at < 0) {
    const next = found.places.findIndex(([start]) => start >= from);
    at = backwards ? (next <= 0 ? n : next) - 1 : Math.max(next, 0);
  } else {
    at = (at + (backwards ? n - 1 : 1)) % n;
  }
  const [start] = found.places[at];
  if (start < Number(pane().dataset.a) || start >= Number(pane().dataset.b) || !holder(start)) await open(start);
  selectText(found.places[at]);
  const more = found.n > n ? `, the first ${n.toLocaleString("en-US")} can be opened` : "";
  return `${at + 1} of ${found.n.toLocaleString("en-US")}${more}`;
}
