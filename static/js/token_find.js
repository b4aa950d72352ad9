// Search in what the pane shows: the text itself, across token and run borders.

import { pane } from "./token_places.js";

let at = -1;
let last = "";

function textNodes() {
  const nodes = [];
  let length = 0;
  const walker = document.createTreeWalker(pane(), NodeFilter.SHOW_TEXT);
  let text = "";
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.closest(".toks")) continue;
    nodes.push([length, node]);
    length += node.data.length;
    text += node.data;
  }
  return [nodes, text];
}

function locate(nodes, position) {
  let low = 0;
  let high = nodes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (nodes[middle][0] <= position) low = middle; else high = middle - 1;
  }
  return [nodes[low][1], position - nodes[low][0]];
}

/** Go to the next (or the previous) place that holds the wanted text; returns a sentence that says where one is. */
export function find(wanted, backwards = false) {
  if (!wanted) return "";
  const [nodes, text] = textNodes();
  const where = text.toLowerCase();
  const needle = wanted.toLowerCase();
  const places = [];
  for (let i = where.indexOf(needle); i >= 0; i = where.indexOf(needle, i + 1)) places.push(i);
  if (!places.length) return "not in what is shown";
  at = wanted === last ? (at + (backwards ? places.length - 1 : 1)) % places.length : 0;
  last = wanted;
  const drawn = document.createRange();
  drawn.setStart(...locate(nodes, places[at]));
  drawn.setEnd(...locate(nodes, places[at] + needle.length));
  const selection = getSelection();
  selection.removeAllRanges();
  selection.addRange(drawn);
  drawn.startContainer.parentElement.scrollIntoView({ block: "center" });
  return `${at + 1} of ${places.length}`;
}
