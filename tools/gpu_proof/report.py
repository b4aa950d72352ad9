"""Writes a proof's result into docs/gpu.md: the part between two marks is replaced, the rest stays."""

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- result: begin -->", "<!-- result: end -->"


def write_report(path: Path, result: dict[str, Any], command: str) -> None:
    """Put the result into the page at ``path``. Raises ``ValueError`` when the page has no place for it."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    head, begin, behind = page.partition(BEGIN)
    _, end, tail = behind.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}. The result goes between them.")
    path.write_text(f"{head}{BEGIN}\n{describe(result, command)}{END}{tail}", encoding="utf-8")


def describe(result: dict[str, Any], command: str) -> str:
    """The result as Markdown."""
    plans, load = result["plans"], result["load"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if name != "device")
    size = (
        f"The model has {result['parameters']:,} parameters ({plans['shape']['dtype']}, random weights). Each run made "
        f"{plans['trajectories']} trajectories of up to {plans['rounds']} turns, {load['peak_live']} at once at most."
    )
    lines = [
        f"{result['date']}, {result['versions']['device']}, `{command}`",
        "",
        f"With {versions}.",
        "",
        size,
        "",
        "| run | tokens sampled | worker, tokens/s | bare loop, tokens/s | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {index} | {pair['tokens']:,} | {pair['worker_tokens_per_second']:,.0f} "
        f"| {pair['bare_tokens_per_second']:,.0f} | {pair['ratio']:.3f} |"
        for index, pair in enumerate(load["throughput"], start=1)
    ]
    lines += ["", "| verified | | found |", "|---|---|---|"]
    lines += [
        f"| {verdict['name']} | {'passed' if verdict['passed'] else 'FAILED'} | {verdict['sentence']} |"
        for verdict in result["verdicts"]
    ]
    return "\n".join(lines) + "\n"
