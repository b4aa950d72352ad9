// What happened, in words over the page.

let overlay = 0;

/** A sentence in the overlay: seen for some seconds, and read aloud. */
export function say(text) {
  const status = document.getElementById("pane-status");
  if (!status) return;
  status.textContent = text;
  status.classList.add("fresh");
  clearTimeout(overlay);
  overlay = setTimeout(() => status.classList.remove("fresh"), 4000);
}
