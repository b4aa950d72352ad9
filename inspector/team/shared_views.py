"""The view that a share link opens: its address, and what it is in words."""

from django.http import Http404, QueryDict
from django.urls import reverse

from inspector.trajectories.place import VIEW_NAMES, View
from inspector.trajectories.tabs import TABS, TOKENS
from inspector.trajectories.tokens.lenses import column_label, find
from rollout_inspector.diagnose.kinds import title_of
from rollouts.store.models import ShareLink

SIDES = {"prompt": "its prompt and what it should have been", "trained": "sampled and trained"}


def target_of(link: ShareLink) -> tuple[str, str, str]:
    """Kind, name and address (query included) of what a link opens."""
    query = f"?{link.query}" if link.query else ""
    if link.run is not None:
        return "run", link.run.name, f"/runs/{link.run.code}{query}"
    if link.trajectory is not None:
        # The parameter `page` names a tab; the others are those of its address.
        params = QueryDict(link.query, mutable=True)
        page = (params.pop("page", None) or [""])[-1]
        tab = next((tab for tab in TABS if tab.slug == page), TOKENS)
        query = f"?{params.urlencode()}" if params else ""
        return "trajectory", link.trajectory.external_id, reverse(tab.url_name, args=[link.trajectory.code]) + query
    if link.check_result is not None:
        return "check", link.check_result.template_name, f"/templates/checks/{link.check_result.code}{query}"
    raise Http404("What this link opened has been deleted.")


def view_words(link: ShareLink) -> str:
    """What a link shows of its target, such as ``side by side, step 3``; empty = its page as it opens by itself."""
    words: list[str] = []
    for name, values in QueryDict(link.query).lists():
        value = values[-1]
        if name == "page":
            words += [tab.here for tab in TABS if tab.slug == value and tab.here]
        elif name == "open":
            words.append(f"{len(values)} fold{'s' * (len(values) != 1)} open")
        elif name not in ("place", "w", "top", "after") and value:
            words.append(_words(name, value))
    return ", ".join(words)


def _words(name: str, value: str) -> str:
    if name == "view":
        return VIEW_NAMES[View.TOKENS if value == View.TOKENS else View.RUNS]
    if name == "lens":
        lens = find(value)
        return f"lens {lens.label if lens else column_label(value)}"
    if name == "t":
        return f"tokens {value}"
    if name == "find":
        return f"find “{value}”"
    if name == "solo":
        return f"turn {value} alone"
    if name == "side":
        return SIDES.get(value, f"side {value}")
    if name == "finding":
        return f"finding “{title_of(value)}”"
    return f"{name.replace('_', ' ')} {value}"
