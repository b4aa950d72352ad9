// A comment on what is selected: the form opens beside the tokens, its range filled in. Without it the form is filled in by hand.

import { say } from "./status.js";
import { pane, selected, textSelectionRange } from "./token_places.js";

const form = () => document.getElementById("comment-form");

/** The range field follows the selection, until somebody types. */
function fillIn(range) {
  const box = form();
  if (!box || !range || box.elements.text.value || !box.elements.t) return;
  box.elements.t.value = `${range[0]}-${range[1]}`;
  box.elements.row.value = pane().dataset.row;
}

/** Open the form at the selection, and type. */
export function commentOn() {
  const box = form();
  if (!box) return;
  fillIn(textSelectionRange() ?? selected());
  box.closest("details").open = true;
  box.scrollIntoView({ block: "nearest" });
  box.elements.text.focus({ preventScroll: true });
  const range = box.elements.t?.value;
  say(range ? `comment on tokens ${range}` : "comment on the trajectory");
}

document.addEventListener("tokens:selected", () => fillIn(selected()));
document.addEventListener("click", (event) => {
  if (event.target.closest?.("[data-comment]")) commentOn();
});
