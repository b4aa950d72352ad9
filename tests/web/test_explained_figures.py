"""Every figure of the pages of a run and of a trajectory says what it is: in its title, or in a list on the page."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from django.test import Client

from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from rollouts.worker.jobs import do_job
from tests.samples.training_steps import save, world
from tests.web.samples import one_line, stored_run

pytestmark = pytest.mark.django_db

FIGURES = ("figures-line", "properties", "gap-figures")
"""Classes of the lists whose labels are figures; the heads of right-aligned columns are figures as well."""


class Figures(HTMLParser):
    """The labels of a page's figures, and those that are explained."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lists: list[str] = []  # The classes of the open lists.
        self.label: tuple[bool, list[str]] | None = None  # Of the open label: it is a figure's, and its words.
        self.figures: list[tuple[str, str]] = []  # Label and title.
        self.meanings: set[str] = set()
        # A head of the list of trajectories sorts it; the title of its link says how.
        self.feed(re.sub(r"<th [^>]*>\s*<a [^>]*title=\"Sort: .*?</th>", "", html))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "dl":
            self.lists.append(given.get("class", "").replace("properties settings", "settings"))  # no figures
        is_head = tag == "th" and given.get("scope") == "col" and given.get("class") == "right"
        is_figure = is_head or (tag == "dt" and bool({*self.lists[-1].split()} & {*FIGURES}))
        if is_figure or (tag == "dt" and self.lists[-1] == "meanings"):
            self.label = is_figure, []
            if is_figure:
                self.figures.append(("", given.get("title", "")))

    def handle_data(self, data: str) -> None:
        if self.label is not None:
            self.label[1].append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "dl":
            self.lists.pop()
        if tag in ("dt", "th") and self.label is not None:
            is_figure, words = self.label
            text, self.label = " ".join("".join(words).split()), None
            if is_figure:
                self.figures[-1] = text, self.figures[-1][1]
            else:
                self.meanings.add(text)

    @property
    def unexplained(self) -> list[str]:
        return [label for label, title in self.figures if not title.strip() and label not in self.meanings]


def read(web: Client, path: str, *labels: str) -> Figures:
    """The figures of a page, on which at least these stand."""
    figures = Figures(one_line(web.get(path)))
    assert {*labels} <= {label for label, _ in figures.figures}
    return figures


def training_run(kind: str) -> Run:
    run = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
    save(run, world())
    if kind:
        job, _ = ask_job(run, kind)
        do_job(job.pk)
    return run


def test_figures_of_a_run_and_of_its_cost(web: Client) -> None:
    run = stored_run(4)
    Run.objects.filter(pk=run.pk).update(n_failed=1, n_rejected=2)
    path = f"/runs/{run.code}"
    assert read(web, path, "steps", "rows per call", "✕ failed", "◆ rejected", "Not decidable").unexplained == []
    assert read(web, f"{path}/cost", "Tokens lost", "Extra rows", "With a finding").unexplained == []


@pytest.mark.parametrize("page", ["", "/record", "/mask"])
def test_figures_of_a_trajectory(web: Client, page: str) -> None:
    run = stored_run(2)
    path = f"/trajectories/{run.trajectories.earliest('index').code}{page}"
    labels = ["reward", "stopped by", "group", "steps", "rows", "tokens", "trained", "damage", "tokenizer"]
    html = one_line(web.get(path))
    menu = html.partition('<dl class="meanings">')[2].partition("</dl>")[0]
    assert re.findall(r"<dt>([^<]+)</dt><dd>[^<]+</dd>", menu) == labels  # where a keyboard reaches it
    head = html.partition('<dl class="properties">')[2].partition("</dl>")[0]
    figures = Figures(f'<dl class="properties">{head}</dl>').figures
    assert {"steps", "rows", "tokens", "trained"} <= {label for label, _ in figures}
    assert all(title for _, title in figures)


def test_figures_of_the_gap_and_of_the_weights(web: Client) -> None:
    run = training_run("gap")
    labels = ("Mean, without sign", "KL estimate k1", "Multiplicative error", "Signed mean", "Ratio", "Mean gap")
    assert read(web, f"/runs/{run.code}/gap", *labels).unexplained == []
    run = training_run("loss_weights")
    assert read(web, f"/runs/{run.code}/gap", "Tokens weighed", "Clipped", "Masked").unexplained == []


@pytest.mark.parametrize("html", [
    '<dl class="gap-figures"><div><dt>Never</dt><dd>1</dd></div></dl>',
    '<dl class="properties figures"><dt title=" ">Never</dt></dl>',
    '<table><th scope="col" class="right"><span>Never</span></th></table>',
    '<dl class="meanings"><dt>Other</dt></dl><dl class="figures-line"><dt>Never</dt></dl>',
])  # fmt: skip
def test_a_figure_without_an_explanation_would_be_found(html: str) -> None:
    assert Figures(html).unexplained == ["Never"]
    explained: Any = Figures('<dl class="meanings"><dt>Never</dt></dl>' + html)
    assert explained.unexplained == []
