// Go to: Ctrl-K opens a dialog in which a name is typed and a place is chosen. Without it, /go is a page.
"use strict";
{
  const dialog = document.getElementById("go");
  const field = document.getElementById("go-field");
  const options = () => [...dialog.querySelectorAll("#go-list a[role=option]")];
  const chosen = () => dialog.querySelector("#go-list [aria-selected=true]");
  const isCurrent = () => dialog.querySelector("#go-list").dataset.q === field.value.trim().replace(/\s+/g, " ");
  let goes = false; // Enter was pressed before the places of what is typed had come

  function choose(option) {
    for (const other of options()) other.setAttribute("aria-selected", String(other === option));
    if (option) field.setAttribute("aria-activedescendant", option.id);
    else field.removeAttribute("aria-activedescendant");
    option?.scrollIntoView({ block: "nearest" });
  }

  function go(option) {
    goes = false;
    dialog.close();
    location.assign(option.href);
  }

  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey || event.key.toLowerCase() !== "k") return;
    event.preventDefault();
    if (dialog.open) {
      dialog.close();
    } else {
      dialog.showModal();
      field.select();
    }
  });

  field.addEventListener("keydown", (event) => {
    const all = options();
    const at = all.indexOf(chosen());
    const moves = { ArrowDown: at + 1, ArrowUp: at < 0 ? -1 : at - 1 + all.length };
    if (event.key in moves && all.length) {
      event.preventDefault();
      choose(all.at(moves[event.key] % all.length));
    } else if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      goes = true;
      if (isCurrent() && chosen()) go(chosen());
    }
  });
  field.addEventListener("input", () => { goes = false; });

  dialog.addEventListener("htmx:afterSettle", () => {
    if (!isCurrent()) return;
    const all = options();
    choose(all[0]);
    if (goes && all[0]) go(all[0]);
    else if (field.value) announce(all.length === 1 ? "1 place" : `${all.length} places`);
  });
}
