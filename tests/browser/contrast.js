// What has less than 3:1 of the glyphs, lines and bars, on each ground that a token can have, as the browser draws it.
() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  // The colour of these layers, the lowest first, as the browser itself mixes them.
  const mixed = (layers) => {
    brush.globalAlpha = 1;
    for (const [color, alpha] of layers) {
      brush.globalAlpha = alpha;
      brush.fillStyle = color;
      brush.fillRect(0, 0, 1, 1);
    }
    return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const layersBehind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      const mark = style.boxShadow.match(/^(rgba?\([^)]*\)|color\([^)]*\)) 0px 0px 0px (\d+)/);
      if (mark && Number(mark[2]) > 20) layers.unshift([mark[1], 1]);
      layers.unshift([style.backgroundColor, 1]);
    }
    return [["#fff", 1], ...layers];
  };
  const found = [];
  let count = 0;
  const check = (what, behind, color, alpha) => {
    const [a, b] = [light(mixed(behind)), light(mixed([...behind, [color, alpha]]))];
    const value = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (value < 3) found.push(`${what}: ${value.toFixed(2)}`);
    count += 1;
  };
  const say = (what, element, color, alpha = 1) => check(what, layersBehind(element), color, alpha);
  const pane = document.getElementById("pane");
  const glyphs = { space: "<b> </b>", line: "<b class=n>\n</b>", tab: "<b class=t>\t</b>", return: "<b class=r></b>", hidden: "<b class=z data-x=A1>?</b>" };
  const box = Object.assign(document.createElement("div"), { className: "toks" });
  pane.append(box);
  const states = ["", "o1", "o2", "o3", "o4", "m", "m x", "x", "f", "fi", "k", "k f m", "sel", "w m", ...[0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((n) => [`q${n}`, `q${n} m sel`])];
  const before = pane.dataset.lens;
  for (const lens of ["mask", "origin", "logprob", "value", "signed"]) {
    pane.dataset.lens = lens;
    for (const tag of ["i", "span"]) for (const names of states) {
      for (const [glyph, html] of Object.entries(glyphs)) {
        box.innerHTML = `<${tag} class="${names}">${html}</${tag}>`;
        const style = getComputedStyle(box.querySelector("b"), "::before");
        say(`${lens} ${tag}.${names} ${glyph}`, box.querySelector("b"), style.color, Number(style.opacity));
      }
      const token = box.firstElementChild, style = getComputedStyle(token);
      const around = box;
      if (names.includes("m")) say(`${lens} ${tag}.${names} rule below`, around, style.borderBottomColor);
      if (/\bf\b|fi/.test(names)) say(`${lens} ${tag}.${names} rule above`, around, style.borderTopColor);
      if (names.includes("x")) say(`${lens} ${tag}.${names} outline`, token, style.outlineColor);
      if (names.includes("w")) say(`${lens} ${tag}.${names} sign`, token, getComputedStyle(token, "::before").color);
    }
  }
  box.innerHTML = '<a class="gap" href="#" data-gap="1 token missing"></a>';
  say("gap", box.firstElementChild, getComputedStyle(box.firstElementChild, "::before").color);
  // Bars, lines and dots, each on the ground that it is drawn on.
  const drawn = [
    ["map-finding", "map-ground"], ["map-finding error", "map-ground"], ["map-finding warning", "map-ground"], ["map-completion", "map-ground"],
    ["map-trained", "map-ground"], ["map-mark", "map-ground"], ["hist-bar", ""], ["is-error", "rest"], ["is-warning", "rest"], ["shared-part", "shared-all"],
  ];
  for (const [names, ground] of drawn) {
    box.innerHTML = `<svg class="severity-bar"><rect class="${ground}"/><rect class="${names}"/></svg>`;
    const [below, bar] = box.querySelectorAll("rect");
    const layers = ground ? [...layersBehind(box), [getComputedStyle(below).fill, 1]] : layersBehind(box);
    const style = getComputedStyle(bar);
    check(names, layers, style.fill, Number(style.opacity));
  }
  for (const names of ["dot", "dot error", "dot warning", "glyph-error", "glyph-warning", "glyph-info", "chip probe-broken", "chip probe-raises", "chip severity-warning"]) {
    box.innerHTML = `<span class="${names}">1</span>`;
    say(names, box.firstElementChild, getComputedStyle(box.firstElementChild).color);
  }
  box.remove();
  pane.dataset.lens = before;
  return { found, count };
}
