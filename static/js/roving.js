// A group of links or buttons is one stop of the Tab key; arrows go on inside it.

const ITEMS = "a[href], button:not([disabled])";

function stopAt(group, item) {
  for (const other of group.querySelectorAll(ITEMS)) other.tabIndex = other === item ? 0 : -1;
}

/** Make each of the groups one stop: at its current item, else at its first. */
export function makeRoving(groups) {
  for (const group of groups) {
    group.dataset.roving = "";
    const items = [...group.querySelectorAll(ITEMS)];
    stopAt(group, items.find((item) => item.hasAttribute("aria-current")) ?? items[0]);
  }
}

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

/** Moves the focus inside a group; true when the key did. */
export function roveBy(event) {
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
