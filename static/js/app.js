// The shell: theme, list of keys, copying, moments, drop zone. Every page works without it.
"use strict";

const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;

function cookieTheme() {
  const match = document.cookie.match(/(?:^|; )theme=(light|dark)(?:;|$)/);
  return match ? match[1] : "auto";
}

function applyTheme(theme) {
  if (theme === "auto") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", theme);
  const seconds = theme === "auto" ? 0 : 365 * 24 * 3600;
  const secure = location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `theme=${theme}; Path=/; Max-Age=${seconds}; SameSite=Lax${secure}`;
  labelTheme(theme);
}

function labelTheme(theme) {
  for (const button of document.querySelectorAll("[data-theme-toggle]")) {
    button.hidden = false;
    button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme}. Change it.`);
  }
}

// Says something to a screen reader, and nothing on the screen.
function announce(sentence) {
  const announcer = document.getElementById("announcer");
  if (announcer) announcer.textContent = sentence;
}

// What happened, in words where the page shows them: seen for some seconds, and read aloud.
let statusTimer = 0;

function say(sentence) {
  const status = document.getElementById("pane-status");
  if (!status) return;
  status.textContent = sentence;
  status.classList.add("fresh");
  clearTimeout(statusTimer);
  statusTimer = setTimeout(() => status.classList.remove("fresh"), 4000);
}

/** Put text on the clipboard; also where the page is not served from localhost or over HTTPS. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

// --- moments: "3 min ago" beside the exact one, which stays in the title -----------------------------------------------
const UNITS = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });

function showMoments(scope) {
  for (const time of scope.querySelectorAll("time[datetime]:not([data-exact])")) {
    const moment = new Date(time.dateTime);
    if (Number.isNaN(moment.valueOf())) continue;
    const seconds = (moment - Date.now()) / 1000;
    const [unit, length] = UNITS.find(([, n]) => Math.abs(seconds) >= n) || ["second", 1];
    if (!time.title) time.title = `${time.textContent.trim()} UTC`;
    time.textContent = relative.format(Math.trunc(seconds / length), unit);
  }
}

// --- drop zone: the file input stays the real control ------------------------------------------------------------------
function listFiles(zone) {
  const input = zone.querySelector("input[type=file]");
  const list = zone.querySelector("[data-files]");
  if (!input || !list) return;
  list.replaceChildren(...Array.from(input.files, (file) => {
    const item = document.createElement("li");
    const megabytes = file.size / 1e6;
    item.textContent = `${file.name} · ${megabytes >= 1 ? megabytes.toFixed(1) + " MB" : Math.ceil(file.size / 1000) + " kB"}`;
    return item;
  }));
}

function prepareZone(zone) {
  const input = zone.querySelector("input[type=file]");
  if (!input) return;
  input.addEventListener("change", () => listFiles(zone));
  for (const name of ["dragenter", "dragover"]) zone.addEventListener(name, (event) => { event.preventDefault(); zone.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) zone.addEventListener(name, () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    if (!event.dataTransfer.files.length) return;
    const all = new DataTransfer();
    if (input.multiple) for (const file of input.files) all.items.add(file);
    for (const file of event.dataTransfer.files) all.items.add(file);
    input.files = all.files;
    listFiles(zone);
  });
}

// --- parts that ask again: in a tab that nobody looks at, every twenty seconds ------------------------------------------
const HIDDEN_MS = 20000;
const asked = new Map();

document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.detail.elt;
  if (!part.getAttribute("hx-trigger")?.startsWith("every")) return;
  const now = Date.now();
  if (document.hidden && now - (asked.get(part.id) ?? 0) < HIDDEN_MS) event.preventDefault();
  else asked.set(part.id, now);
});

// --- a server that is away for a moment: the page stays, says so, and goes on by itself ----------------------------------
const LONGEST_AWAY_MS = 30000;
let awayPause = 1000;
let awayUntil = 0;

function serverAway(isAway) {
  const shown = document.getElementById("away");
  if (!isAway) shown?.remove();
  if (!isAway || shown) return;
  const line = document.createElement("p");
  line.id = "away";
  line.className = "away";
  line.setAttribute("role", "status");
  (document.querySelector(".workbench") ?? document.getElementById("content")).prepend(line);
  line.textContent = "The server is not reachable. Trying again.";
}

const isPoll = (event) => event.detail.elt?.getAttribute?.("hx-trigger")?.startsWith("every");

for (const name of ["htmx:sendError", "htmx:responseError"]) {
  document.addEventListener(name, (event) => {
    const { status } = event.detail.xhr;
    if (!isPoll(event) || ![0, 502, 503, 504].includes(status)) return;
    const asked = status ? 1000 * Number(event.detail.xhr.getResponseHeader("Retry-After")) || 0 : 0;
    awayPause = Math.min(2 * awayPause, LONGEST_AWAY_MS);
    awayUntil = Date.now() + Math.min(Math.max(awayPause, asked), LONGEST_AWAY_MS);
    serverAway(true);
  });
}
document.addEventListener("htmx:beforeRequest", (event) => {
  if (isPoll(event) && Date.now() < awayUntil) event.preventDefault();
});
document.addEventListener("htmx:beforeOnLoad", (event) => {
  if (!isPoll(event) || event.detail.xhr.status >= 500) return;
  awayPause = 1000;
  awayUntil = 0;
  serverAway(false);
});

// --- a page that the server has loaded again, as when a run ends: what had the focus has it again ----------------------
const HELD = "focus-held";

function nameOf(element) {
  if (!element || element === document.body) return null;
  if (element.id) return `#${CSS.escape(element.id)}`;
  const name = ["href", "name"].find((attribute) => element.hasAttribute(attribute));
  return name ? `${element.localName}[${name}="${CSS.escape(element.getAttribute(name))}"]` : element.localName;
}

document.addEventListener("htmx:beforeOnLoad", (event) => {
  const name = nameOf(document.activeElement);
  if (name && event.detail.xhr.getResponseHeader("HX-Refresh")) {
    const place = [...document.querySelectorAll(name)].indexOf(document.activeElement);
    sessionStorage.setItem(HELD, JSON.stringify([location.pathname, name, place]));
  }
});

function focusAsBefore() {
  const held = sessionStorage.getItem(HELD);
  sessionStorage.removeItem(HELD);
  const [path, name, place] = held ? JSON.parse(held) : [];
  if (path === location.pathname) document.querySelectorAll(name)[place]?.focus({ preventScroll: true });
}

// --- keys --------------------------------------------------------------------------------------------------------------
let pendingG = 0;

function isTyping(event) {
  return event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, [contenteditable]");
}

document.addEventListener("keydown", (event) => {
  if (isTyping(event) || event.defaultPrevented) return;
  if (event.key === "?") {
    document.getElementById("keys")?.showModal();
    event.preventDefault();
  } else if (event.key === "g") {
    pendingG = event.timeStamp;
  } else if (pendingG && event.timeStamp - pendingG < 1200 && document.querySelector(".main-nav")) {
    const place = { r: "/", n: "/runs/new", i: "/import", s: "/search" }[event.key];
    pendingG = 0;
    if (place) location.assign(place);
  }
});

document.addEventListener("click", async (event) => {
  const opener = event.target.closest("[data-opens]");
  if (opener) {
    const dialog = document.getElementById(opener.dataset.opens);
    if (dialog?.showModal) {
      event.preventDefault();
      dialog.showModal();
    }
    return;
  }
  const fetcher = event.target.closest("[data-copy-from]");
  if (fetcher) {
    const label = fetcher.textContent;
    let said = "There is nothing to copy";
    try {
      const answer = await fetch(fetcher.dataset.copyFrom);
      if (answer.ok) said = (await copyText(await answer.text())) ? "Copied" : "Download it instead";
    } catch {
      said = "The server does not answer";
    }
    fetcher.textContent = said;
    announce(said);
    setTimeout(() => { fetcher.textContent = label; }, 2000);
    return;
  }
  const copier = event.target.closest("[data-copy]");
  if (copier) {
    const source = document.getElementById(copier.dataset.copy);
    const label = copier.textContent;
    const copied = await copyText(source?.value ?? source?.textContent ?? "");
    copier.textContent = copied ? "Copied" : "Select it and press Ctrl+C";
    announce(copier.textContent);
    setTimeout(() => { copier.textContent = label; }, 2000);
    return;
  }
  if (event.target.closest("[data-theme-toggle]")) {
    applyTheme(THEMES[(THEMES.indexOf(cookieTheme()) + 1) % THEMES.length]);
    return;
  }
  // A click on a dialog's backdrop closes it.
  if (event.target instanceof HTMLDialogElement) event.target.close();
});

document.addEventListener("submit", (event) => {
  const button = event.target.querySelector("button[data-busy]");
  if (button) setTimeout(() => { button.disabled = true; button.textContent = button.dataset.busy; }, 0);
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) {
    // Back to a form that was sent: its button must work again.
    if (document.querySelector("button[data-busy]:disabled")) location.reload();
  }
});

document.addEventListener("DOMContentLoaded", () => {
  labelTheme(cookieTheme());
  for (const element of document.querySelectorAll(".needs-js")) element.hidden = false;
  showMoments(document);
  document.querySelectorAll("[data-drop]").forEach(prepareZone);
  focusAsBefore();
  document.querySelector("[aria-invalid=true]")?.focus();
});
setInterval(() => showMoments(document), 15000);
document.addEventListener("htmx:afterSettle", (event) => showMoments(event.target));
