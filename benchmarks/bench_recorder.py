"""What the recorder adds to a call: medians against direct calls to the same local server, in turn, in one run."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollouts.store.models import Run
from rollouts.store.runs.runs import delete_run
from tests.conftest import ROOT
from tests.recorder.conftest import start, stop

__all__ = ["start"]

CALLS = 300
PROMPT_TOKENS = 4000
SERVER = """
import json, sys
from aiohttp import web

prompt, completion = list(range(int(sys.argv[1]))), list(range(64))

async def answer(request):
    asked = json.loads(await request.read())
    ids = asked.get("return_token_ids")
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 200}, "logprobs": None,
              "token_ids": completion if ids else None, "finish_reason": "stop", "stop_reason": None}
    body = {"id": "x", "model": "m", "prompt_token_ids": prompt if ids else None, "choices": [choice]}
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")

async def main():
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

import asyncio
asyncio.run(main())
"""


@pytest.mark.bench
@pytest.mark.parametrize("prompt_tokens", [100, PROMPT_TOKENS])
def test_added_latency(start: Any, tmp_path: Path, prompt_tokens: int) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = subprocess.Popen(
        [sys.executable, str(script), str(prompt_tokens)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert server.stdout is not None
        direct = f"http://127.0.0.1:{int(server.stdout.readline())}"
        process, said = start(direct)
        taken = asyncio.run(measure({"direct": f"{direct}/v1", "recorded": said["url"]}, prompt_tokens))
        counts = stop(process)
    finally:
        server.kill()
        server.wait(10)
    median = {name: statistics.median(values) * 1000 for name, values in taken.items()}
    high = {name: statistics.quantiles(values, n=20)[-1] * 1000 for name, values in taken.items()}
    print(
        f"\nrecorder, {prompt_tokens} prompt tokens, {CALLS} calls: direct {median['direct']:.2f} ms, recorded "
        f"{median['recorded']:.2f} ms: adds {median['recorded'] - median['direct']:.2f} ms in the median "
        f"(95th percentile {high['recorded'] - high['direct']:.2f} ms)"
    )
    assert counts["stored"] == counts["calls"] == CALLS + 20 and counts["without_ids"] == 0
    assert Run.objects.get(code=said["run"]).n_steps == CALLS + 20
    delete_run(Run.objects.get(code=said["run"]))


async def measure(urls: dict[str, str], prompt_tokens: int) -> dict[str, list[float]]:
    """Seconds of each call, the two ways in turn; the first 20 of each are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in urls}
    messages = [{"role": "user", "content": "word " * prompt_tokens}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    async with aiohttp.ClientSession() as http:
        for n in range(CALLS + 20):
            for name, url in urls.items():
                began = time.perf_counter()
                headers = {"X-Session-Id": f"s{n // 8}", "Content-Type": "application/json"}
                async with http.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
                    await answer.read()
                if n >= 20:
                    taken[name].append(time.perf_counter() - began)
                await asyncio.sleep(0.005)
    return taken
