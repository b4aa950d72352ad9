"""Write a file again, with the trajectories that fail split, masked or left out."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_inspector.commands.tokenizer_options import add_tokenizer_options, load_renderer, load_tokenizer
from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.folders import MANIFEST
from rollout_inspector.guard.fail_rules import fail_rule
from rollout_inspector.guard.mended_file import OWN, Mending, mend_file
from rollout_inspector.guard.mended_trajectory import MendWay, Remake
from rollout_inspector.streams.strategies import STRATEGIES

if TYPE_CHECKING:
    from rollout_inspector.text.chat_templates import TemplateRenderer
    from rollout_inspector.text.tokenizers import LoadedTokenizer


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("file", metavar="FILE", help="a file of any format that can be read")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file that is written")
    ways = parser.add_mutually_exclusive_group()
    for way, text in (
        (MendWay.SPLIT, "begin a new trajectory at each break, and mask faults of rows (default)"),
        (MendWay.MASK, "keep what follows the last break; what came before is prompt, with mask 0"),
        (MendWay.DROP, "leave out every trajectory that fails"),
    ):
        ways.add_argument(f"--{way}", dest="way", action="store_const", const=way, help=text)
    ways.add_argument("--strategy", metavar="S", choices=list(STRATEGIES), help=f"rows of {', '.join(STRATEGIES)}")
    add_tokenizer_options(parser)
    parser.add_argument("--fail-on", default="error", metavar="SEVERITY,KIND,...", help="what fails, as for check")
    parser.add_argument("--input-format", default="auto", metavar="NAME", help=f"auto, or one of: {', '.join(FORMATS)}")
    parser.add_argument("--output-format", choices=OWN, metavar="NAME", help=" or ".join(OWN))


def run(options: Namespace) -> int:
    """Mend the file and print what was done."""
    way = MendWay.STRATEGY if options.strategy else options.way or MendWay.SPLIT
    rule = fail_rule(options.fail_on)
    tokenizer = load_tokenizer(options.tokenizer)
    renderer = load_renderer(tokenizer, options.chat_template)
    remake = _remake(options.strategy, tokenizer, renderer) if options.strategy else None
    output = Path(options.output)
    mending = mend_file(
        Path(options.file), output, way, rule, tokenizer, renderer, remake, options.input_format,
        options.output_format or "",
    )
    sys.stdout.write(as_text(mending, str(output)))
    return 0


def _remake(slug: str, tokenizer: LoadedTokenizer | None, renderer: TemplateRenderer | None) -> Remake:
    """What makes the rows of a strategy."""
    from rollout_inspector.streams.strategies import Context
    from rollout_inspector.streams.strategies.replay import replay, with_replies
    from rollout_inspector.text.replies.parsing import parser_of

    if tokenizer is None or renderer is None:
        why = "There is no tokenizer with a chat template: name one with --tokenizer."
        context = Context.without_renderer(why)
        return lambda trajectory: replay(trajectory, STRATEGIES[slug], context)
    context = Context(tokenizer, renderer, tokenizer.stop_ids, bridge=renderer.bridge)
    parse = parser_of(tokenizer, renderer)
    return lambda trajectory: replay(with_replies(trajectory, parse), STRATEGIES[slug], context)


def as_text(mending: Mending, output: str) -> str:
    """Before and after, for a terminal."""
    before, after = mending.before, mending.after
    lines = [f"{'':28}{'before':>12}{'after':>12}"]
    counts = [
        (name.replace("_", " "), getattr(before, name), getattr(after, name))
        for name in ("trajectories", "rows", "sampled_tokens", "trained_tokens")
    ]
    kinds = dict.fromkeys([*before.kinds, *after.kinds])
    counts += [(kind, before.kinds.get(kind, 0), after.kinds.get(kind, 0)) for kind in kinds]
    lines += [f"{name:28}{first:>12,}{second:>12,}" for name, first, second in counts]
    done = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in sorted(mending.actions.items()))
    return "\n".join([*lines, "", f"{done}.", f"{output} passes the check. Changes: {output}{MANIFEST}", ""])
