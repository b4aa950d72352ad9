// Stop, pressed while a part of the search is under way: the part is waited for, so that no place is lost or shown twice.

let stopping = false;

const stopLink = () => document.querySelector("#search-stop a");
const isUnderWay = () => document.querySelector("#search-more.htmx-request") !== null;

document.addEventListener("htmx:beforeRequest", (event) => {
  const asks = event.detail.elt;
  if (asks === stopLink()) {
    stopping = true;
    if (!isUnderWay()) return;
    asks.textContent = "Stopping …";
    event.preventDefault();
  } else if (asks.id === "search-more" && stopping) {
    // The next part is not asked for.
    event.preventDefault();
  }
});

for (const name of ["htmx:afterSettle", "htmx:sendError", "htmx:responseError"]) {
  document.addEventListener(name, () => {
    const link = stopLink();
    if (!link) stopping = false;
    else if (stopping && !isUnderWay() && link.textContent !== "Stop") {
      link.textContent = "Stop";
      link.click();
    }
  });
}
