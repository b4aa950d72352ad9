"""Two texts compared line by line, as a unified diff. The work is bounded, because strangers wrote the texts."""

from collections.abc import Iterator, Sequence
from itertools import islice

from rollout_inspector.streams.align import MAX_WORK, BoundedMatcher

MAX_LINES = 5_000  # Lines of all diffs of one page.
ROUGH = "\\ The texts differ in too many places to compare each line, so longer stretches are shown as replaced."
CUT = "\\ The rest is not shown: a page shows at most {:,} lines."


class LineDiffs:
    """The diffs of one page. They share the work and the lines, so that many are no way around the bounds."""

    def __init__(self, work: int = MAX_WORK) -> None:
        self.work = work  # What is left of the work; below 0 the diffs are rough.
        self._n_lines = MAX_LINES

    def shown(self, before: str, after: str, names: tuple[str, str] | None = None, context: int = 3) -> list[str]:
        """A diff for a page: it says so where it is rough, and where it is cut."""
        lines = self.unified(before.splitlines(), after.splitlines(), names, context)
        part = list(islice(lines, self._n_lines))
        self._n_lines -= len(part)
        cut = [CUT.format(MAX_LINES)] if next(lines, None) is not None else []
        return [*part, *cut, *([ROUGH] if self.work < 0 else [])]

    def unified(
        self, before: Sequence[str], after: Sequence[str], names: tuple[str, str] | None = None, context: int = 3,
        end: str = "",
    ) -> Iterator[str]:
        """The lines of a unified diff; ``end`` follows its own lines. Without ``names`` it has no heading."""
        matcher = BoundedMatcher(before, after, max(self.work, 0), autojunk=True)
        groups = list(matcher.get_grouped_opcodes(context))
        self.work = matcher.left_work
        if groups and names:
            yield f"--- {names[0]}{end}"
            yield f"+++ {names[1]}{end}"
        for group in groups:
            yield f"@@ -{_range(group[0][1], group[-1][2])} +{_range(group[0][3], group[-1][4])} @@{end}"
            for tag, start, stop, new_start, new_stop in group:
                if tag == "equal":
                    yield from (f" {line}" for line in before[start:stop])
                else:
                    yield from (f"-{line}" for line in before[start:stop])
                    yield from (f"+{line}" for line in after[new_start:new_stop])


def _range(start: int, stop: int) -> str:
    """Lines ``[start, stop)`` as a unified diff numbers them: from 1, or the line before an empty range."""
    n = stop - start
    return f"{start + 1}" if n == 1 else f"{start + (n > 0)},{n}"
