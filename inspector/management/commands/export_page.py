"""Write a trajectory, or one of its findings, to one HTML file that opens without a server."""

from argparse import ArgumentParser
from typing import Any

from inspector.trajectories.discussion import CommentValues
from inspector.trajectories.offline_page import offline_file
from inspector.trajectories.place import View
from rollout_inspector.guard.text_files import write_whole
from rollouts.management import TerminalCommand
from rollouts.management.arguments import trajectory_named
from rollouts.store.trajectories.comments import comments_of


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("trajectory", metavar="TRAJECTORY", help="the code of a trajectory")
        parser.add_argument("--row", metavar="N", help="this row alone, counted from 0 (default: all that fit)")
        parser.add_argument(
            "--finding", metavar="N", help="this finding alone, counted from 1, and the tokens around it"
        )
        parser.add_argument(
            "--view", choices=[view.value for view in View], help="text in runs, or an element per token"
        )
        parser.add_argument("--lens", help="what the fill of a token shows (default: its origin)")
        parser.add_argument("--no-comments", action="store_true", help="leave out what people wrote about it")
        parser.add_argument("-o", "--output", required=True, metavar="FILE")
        parser.add_argument("--json", action="store_true", help="print a JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        trajectory = trajectory_named(options["trajectory"])
        view_options = {name: options[name] for name in ("row", "finding", "view", "lens") if options[name] is not None}
        comments = [] if options["no_comments"] else comments_of(trajectory)
        offline = offline_file(trajectory, view_options, [CommentValues.to_read(item) for item in comments])
        target, data = options["output"], offline.html.encode()
        write_whole(target, data, "The page")
        n_bytes = len(data)
        rows = [dict(zip(("row", "start", "stop", "n_tokens"), part, strict=True)) for part in offline.rows]
        summary = {"trajectory": trajectory.code, "file": target, "bytes": n_bytes, "rows": rows}
        summary |= {"findings": offline.findings, "complete": offline.is_whole}
        parts = "; ".join(f"row {row}, tokens {start:,}-{stop:,} of {n:,}" for row, start, stop, n in offline.rows)
        more = "" if offline.is_whole else " The file does not hold all of the trajectory, and says so."
        if comments:
            more += " It may hold comments and the names of their authors; --no-comments leaves them out."
        sentence = f"{n_bytes:,} bytes written to {target}: {parts or 'no tokens'}.{more}"
        self.print_result(options["json"], summary, sentence)
