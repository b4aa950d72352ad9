"""Make a static site and a JSON of what every chat template of a folder does: `python -m tools.observatory.observe`.

Files of the same bytes are looked at once. Templates of one family stand below each other, and what changed from one
revision to the next is said.
"""

import hashlib
import json
import os
import re
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from difflib import SequenceMatcher
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout_inspector.commands.template_options import template_paths
from rollout_inspector.commands.tokenizer_options import template_text
from rollout_inspector.guard.checked_templates import check_template
from rollout_inspector.guard.template_lock import LOCK_TIME
from rollout_inspector.outputs import whole_file
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.chat_templates.jinja_source.scan import deciding_condition, line_text
from rollout_inspector.text.chat_templates.probes.report import Check, CheckReport, CheckStatus, Purpose, outcome_of
from rollout_inspector.text.chat_templates.repair.search import find_repair

PURPOSES = [purpose for purpose in Purpose if purpose is not Purpose.FACTS]
MAX_CANDIDATES = 60
"""Changed templates that the search for a repair tries for each template; with all 400 a page takes hours."""
STYLE = (
    "body{font:15px/1.5 system-ui;margin:2rem auto;max-width:80rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}"
    "td,th{border:1px solid #ccc;padding:.3rem .5rem;text-align:left;vertical-align:top}"
    "pre{background:#f4f4f4;padding:.5rem;overflow:auto}.no{background:#fde8e8}.yes{background:#e7f6ea}.unknown{background:#fdf6dc}"
)


def purpose_value(purpose: Purpose, report: CheckReport) -> dict[str, Any]:
    """The verdict of a purpose: ``safe`` with a sentence, its cause and line; of an undecided one what is missing."""
    group = [check for check in report.checks if check.purpose is purpose and check.decisive]
    safe, sentence = outcome_of(purpose, report.checks), report.verdicts.get(purpose.value, "not available")
    broken = next((check for check in group if check.status is CheckStatus.BROKEN), None)
    lack = missing(group, sentence) if safe is None else ""
    return {"safe": safe, "sentence": sentence, **cause(broken, report), "missing": lack}


def cause(check: Check | None, report: CheckReport) -> dict[str, Any]:
    """The line of the template that decides on a broken check; empty without one."""
    if check is None:
        return {"cause": "", "line": None, "source": ""}
    line, other = check.comparison.lines if check.comparison is not None else (check.line, None)
    condition = deciding_condition(report.chat_template, line, other)
    line = condition.line if condition is not None else line
    return {"cause": check.detail, "line": line, "source": line_text(report.chat_template, line)}


def missing(group: Sequence[Check], sentence: str) -> str:
    """What the template lacks, so that the purpose cannot be decided. ``sentence``: its verdict."""
    if not group:
        return "A template cannot parse what it renders; a renderer of the package renderers can."
    hidden = sorted({words for check in group for words in check.unrendered.split(", ") if words})
    if hidden:
        return f"It does not render {', '.join(hidden)}."
    return next((check.detail for check in group if check.status is not CheckStatus.OK and check.detail), sentence)


def look(path: str, root: Path, repairs: bool) -> dict[str, Any]:
    """What one template does. Whatever it is, this is a value: a template that cannot be rendered says why."""
    name = Path(path).resolve().relative_to(root).as_posix()
    value: dict[str, Any] = {"name": name, "family": family_of(name), "error": "", "purposes": {}, "shapes": [],
                             "repair": None, "repair_detail": "", "seconds": 0.0}
    began = time.perf_counter()
    try:
        text = template_text(path, "The chat template")
        value |= {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
        checked = check_template(name, text, purposes=PURPOSES, now=LOCK_TIME)
        value["error"] = checked.error
        if (report := checked.report) is not None:
            value["purposes"] = {purpose.value: purpose_value(purpose, report) for purpose in PURPOSES}
            value["shapes"] = [
                {"shape": check.name, "about": check.title, "status": check.status.value, "detail": check.detail,
                 "line": cause(check, report)["line"]}
                for check in report.checks if check.purpose is Purpose.CLIENTS
            ]
            if repairs:
                repair, value["repair_detail"] = find_repair(None, report, n_candidates=MAX_CANDIDATES)
                value["repair"] = None if repair is None else {"diff": repair.diff, "fixes": list(repair.fixes)}
    except (Refusal, OSError) as error:
        value["error"] = str(error)
    value["seconds"] = round(time.perf_counter() - began, 3)
    return value


def family_of(name: str) -> str:
    """The letters with which the name of its model begins: ``qwen`` of ``qwen3-vl.jinja`` and ``trl--qwen3.jinja``."""
    origin, _, model = Path(name).stem.lower().partition("--")
    stem = model if model and not any(map(str.isdigit, origin)) else origin
    return (re.match(r"[a-z_]+", stem) or [stem])[0].strip("_") or stem


def revisions(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What changed from each template of a family to the next one, in the order of their names."""
    changed = []
    for before, after in pairwise(values):
        if before.get("text") is None or after.get("text") is None:
            continue
        blocks = SequenceMatcher(None, before["text"].splitlines(), after["text"].splitlines(), False).get_opcodes()
        kept = {shape["shape"]: shape["status"] for shape in before["shapes"]}
        changed.append({
            "from": before["name"], "to": after["name"],
            "lines": sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal"),
            "purposes": {
                purpose: [before["purposes"][purpose]["safe"], verdict["safe"]]
                for purpose, verdict in after["purposes"].items()
                if purpose in before["purposes"] and before["purposes"][purpose]["safe"] is not verdict["safe"]
            },
            "shapes": {
                shape["shape"]: [kept[shape["shape"]], shape["status"]]
                for shape in after["shapes"] if kept.get(shape["shape"], shape["status"]) != shape["status"]
            },
        })
    return changed


def observe(folder: Path, repairs: bool = False, processes: int | None = None) -> dict[str, Any]:
    """All templates below a folder. Raises :class:`Refusal` where there is none."""
    root = folder.resolve()
    by_text: dict[bytes, str] = {}
    same: dict[str, list[str]] = {}
    for path in template_paths([str(root)]):
        if Path(path).is_dir():  # a tokenizer: its own template, as a file
            path = str(Path(path) / "chat_template.jinja")
        if Path(path).is_file():
            first = by_text.setdefault(hashlib.sha256(Path(path).read_bytes()).digest(), path)
            same.setdefault(first, []).append(Path(path).relative_to(root).as_posix())
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        values = list(pool.map(partial(look, root=root, repairs=repairs), same))
    for value, names in zip(values, same.values(), strict=True):
        value["same"] = names[1:]
    values.sort(key=lambda value: (value["family"], value["name"]))
    families: dict[str, list[dict[str, Any]]] = {}
    for value in values:
        families.setdefault(value["family"], []).append(value)
    return {"version": 1, "templates": values,
            "revisions": {family: revisions(members) for family, members in families.items() if len(members) > 1}}


def page(title: str, body: str) -> str:
    """One page of the site."""
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>")


def _cell(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return "<td class=unknown>–</td>"
    css, word = {True: ("yes", "safe"), False: ("no", "not safe")}.get(verdict["safe"], ("unknown", "undecided"))
    detail = verdict["missing"] if verdict["safe"] is None else verdict["cause"]
    where = f" <small>line {verdict['line']}</small>" if verdict["line"] else ""
    return f"<td class={css} title='{escape(detail, quote=True)}'>{word}{where}</td>"


def index_html(found: Mapping[str, Any]) -> str:
    """The table of all templates."""
    head = "".join(f"<th>{escape(purpose)}</th>" for purpose in PURPOSES)
    lines = []
    for n, value in enumerate(found["templates"]):
        cells = "".join(_cell(value["purposes"].get(purpose.value)) for purpose in PURPOSES)
        broken = sum(shape["status"] in ("broken", "raises") for shape in value["shapes"])
        lines.append(f"<tr><td><a href='{n}.html'>{escape(value['name'])}</a></td>{cells}"
                     f"<td>{broken} of {len(value['shapes'])}</td></tr>")
    changes = "".join(
        f"<li>{escape(change['from'])} → {escape(change['to'])}: {change['lines']} lines; "
        f"{escape(', '.join([*change['purposes'], *change['shapes']]) or 'nothing that a probe sees')}</li>"
        for members in found["revisions"].values() for change in members
    )
    return page("What chat templates do", (
        f"<p>{len(found['templates'])} templates, checked without a tokenizer.</p><table><tr><th>template</th>{head}"
        f"<th>client shapes that it does not take</th></tr>{''.join(lines)}</table><h2>Revisions</h2><ul>{changes}</ul>"
    ))


def template_html(value: Mapping[str, Any]) -> str:
    """The page of one template."""
    def items(rows: Iterable[tuple[str, str]]) -> str:
        return "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)

    verdicts = items(
        (purpose, " ".join(filter(None, [
            verdict["sentence"], verdict["missing"],
            f"Line {verdict['line']}: {verdict['source']}" if verdict["line"] else "",
        ])))
        for purpose, verdict in value["purposes"].items()
    )
    shapes = items((shape["about"], f"{shape['status']}. {shape['detail']}") for shape in value["shapes"])
    repair = f"<h2>Repair</h2><pre>{escape(value['repair']['diff'])}</pre>" if value["repair"] else ""
    return page(value["name"], (
        f"<p><a href='index.html'>All templates</a></p><p>{escape(value['error'])}</p><table>{verdicts}</table>"
        f"<h2>What clients send</h2><table>{shapes}</table>{repair}<p>{escape(value['repair_detail'])}</p>"
    ))


def write_site(found: Mapping[str, Any], out: Path) -> None:
    """The site and its JSON. Every file appears when it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    value = {**found, "templates": [{k: v for k, v in one.items() if k != "text"} for one in found["templates"]]}
    files = {"templates.json": json.dumps(value, indent=1), "index.html": index_html(found)}
    files |= {f"{n}.html": template_html(value) for n, value in enumerate(found["templates"])}
    for name, text in files.items():
        with whole_file(out / name) as file:
            file.write(text.encode("utf-8", "replace"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at all templates of a folder, and write the site."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="../shared/corpus", type=Path)
    parser.add_argument("-o", "--output", default=Path("data/observatory"), type=Path, metavar="DIR")
    parser.add_argument("--repairs", action="store_true", help="look for a repair of each too: minutes, not seconds")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        found = observe(options.folder, options.repairs, options.processes)
    except Refusal as refusal:
        print(refusal)
        return 2
    write_site(found, options.output)
    print(f"{len(found['templates'])} templates in {time.perf_counter() - began:.1f} s: {options.output}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
