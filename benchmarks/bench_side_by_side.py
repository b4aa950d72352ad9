"""Two streams of 100,000 tokens with 500 differences side by side: whole pages beside what a script would do.

The script loads the tokenizer with ``tokenizers``, encodes the decoded text and runs GNU diff over one id a line. A
comparison that encodes nothing stands beside GNU diff alone. *First* is a page in a process that knows nothing of the
tokenizer yet. Prints figures of one run; asserts no time.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from inspector.trajectories.tokens import page_queries as reads
from rollout_inspector.diagnose import examine
from rollout_inspector.streams.align import align_ids
from rollout_inspector.streams.trajectory import Ids, Row, Step, Trajectory
from rollout_inspector.text.tokenizers import limited, loaded
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.store import models
from rollouts.store.chat_templates import tokenizers
from rollouts.store.trajectories.trajectories import load_trajectories
from tests.people import make_member
from tests.web.long_rows import real_text
from tests.web.trajectory_samples import Maker

pytestmark = [pytest.mark.bench, pytest.mark.django_db]

TOKENS, DIFFERENCES, ROUNDS = 100_000, 500, 7


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def forget() -> None:
    """What a process that has just started does not have."""
    limited.close()
    loaded._loaded.clear()
    reads._painter.cache_clear()
    tokenizers.byte_table.cache_clear()


def cut_into_bytes(make: Maker, ids: Ids, n: int) -> Ids:
    """The ids; ``n`` words of them, far apart, as the tokens of their bytes."""
    pieces = make.table.token_bytes(ids)
    of_byte = {
        piece[0]: one for one in range(make.table.vocab_size) if len(piece := make.table.token_bytes([one])[0]) == 1
    }
    words = [i for i, piece in enumerate(pieces) if len(piece) > 2 and piece.isascii() and i % 20 == 0]
    chosen = set(np.random.default_rng(1).choice(words, n, replace=False).tolist())
    cut = [[of_byte[byte] for byte in piece] if i in chosen else [int(ids[i])] for i, piece in enumerate(pieces)]
    return np.concatenate(cut).astype(np.int32)


def gnu_diff(folder: Path, left: Ids, right: Ids) -> None:
    for name, ids in (("left", left), ("right", right)):
        (folder / name).write_text("\n".join(map(str, ids.tolist())))
    subprocess.run(["diff", folder / "left", folder / "right"], stdout=subprocess.DEVNULL, check=False)


def test_whole_pages(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "tokenizers" / "qwen3"
    make = Maker(folder)
    head = make.ids("<|im_start|>user\nRead the project.<|im_end|>\n<|im_start|>assistant\n")
    words = make.ids(make.tokenizer.decode(make.ids(real_text())[:TOKENS]))
    sampled = cut_into_bytes(make, words, DIFFERENCES)
    row_ids = np.concatenate([head, words])
    row = Row(row_ids, np.arange(len(row_ids)) >= len(head), step_indices=(0,))
    values = [
        Trajectory("sampled", (Step(head, sampled),), group="g"),
        Trajectory("recorded", (Step(head, sampled),), rows=(row,), group="g"),
        Trajectory("canonical", (Step(head, words),), group="g"),
        Trajectory("broken", (Step(head, sampled), Step(np.concatenate([row_ids, head]), head)), group="h"),
    ]
    run = make.run(values)
    list(diagnose_run(run))
    one, recorded, canonical, broken = run.trajectories.order_by("index")
    member, client = make_member("bench"), Client(headers={"Accept-Encoding": "gzip"})
    plain = Client()
    for each in (client, plain):
        each.force_login(member)

    def script() -> None:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = encoder.decode(sampled.tolist(), skip_special_tokens=False)
        gnu_diff(tmp_path, sampled, np.array(encoder.encode(text, add_special_tokens=False).ids))

    script()
    by_script = median(seconds(script) for _ in range(3))
    by_diff = median(seconds(lambda: gnu_diff(tmp_path, sampled, words)) for _ in range(ROUNDS))
    aligned = median(seconds(lambda: align_ids(sampled, words)) for _ in range(ROUNDS))
    print(f"\n{len(sampled):,} and {len(words):,} tokens")
    print(f"alignment {1000 * aligned:.0f} ms, GNU diff {1000 * by_diff:.0f} ms: {by_diff / aligned:.1f} times as fast")
    for name, trajectory, query, reference in (
        ("a step, encoded again", one, "?step=0", by_script),
        ("a row, encoded again", one, "?row=0", by_script),
        ("a recorded row", recorded, "?row=0&side=trained", by_diff),
        ("two siblings", one, f"?with={canonical.code}", by_diff),
        ("expected and read", broken, "?step=1&side=prompt", by_diff),
    ):
        address = reverse("trajectory-compare", args=[trajectory.code])
        assert plain.get(f"{address}.json{query}").json()["comparison"]["n_sites"] >= DIFFERENCES - 20
        first = []
        for _ in range(3):
            forget()
            first.append(seconds(lambda address=address, query=query: client.get(address + query)))
        warm = median(seconds(lambda a=address, q=query: client.get(a + q)) for _ in range(ROUNDS))
        print(
            f"{name}: first page {1000 * median(first):.0f} ms (at most {1000 * max(first):.0f}), again "
            f"{1000 * warm:.0f} ms; the script {1000 * reference:.0f} ms"
        )
    models.Retokenized.objects.all().delete()
    forget()
    without = seconds(lambda: client.get(reverse("trajectory-compare", args=[one.code]) + "?row=0"))
    print(f"a row, encoded again, without a stored result: first page {1000 * without:.0f} ms")


def test_what_the_diagnosis_pays(corpus: Path) -> None:
    """The seconds of the diagnosis that go into encoding rows again."""
    from rollout_inspector import diagnose
    from rollout_inspector.streams.canonical import rows_again

    make = Maker(corpus / "tokenizers" / "qwen3")
    values = [make.conversation(str(n), turns=4, size=200) for n in range(200)]
    stored = list(load_trajectories(make.run(values).trajectories.order_by("index")))
    spent = {True: [], False: []}
    try:
        for _ in range(ROUNDS):
            for with_rows in (True, False):
                diagnose.rows_again = rows_again if with_rows else lambda *_: []
                spent[with_rows].append(seconds(lambda: [examine(value, make.tokenizer) for value in stored]))
    finally:
        diagnose.rows_again = rows_again
    more = min(spent[True]) / min(spent[False])
    print(
        f"\n{len(stored)} trajectories of 4 steps: the diagnosis takes {more:.3f} times as long with rows encoded again"
    )
