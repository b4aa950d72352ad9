"""The engines that ask a server: against servers that answer well, badly, late or not at all.

Real ones: tests/recorder/test_real_vllm.py.
"""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import ids_array
from rollouts.sampling.engines import (
    EngineError, Generation, GenerationRequest, RequestRefused, Sampling, build_engine, http
)
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scoring import score_streams
from tests.conftest import wait_until
from tests.ports import HeldPort

PROMPT = ids_array([5, 6, 7])
Answer = Callable[[str, Any], tuple[int, Any]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], str]]:
    """Start a server on a free port that answers as the given function says; returns its address."""
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(http, "MAX_WAIT_SECONDS", 0.01)
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, reply = answer(self.path, body)
                raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://example.invalid/")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = handle_any

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def vllm_like(path: str, body: Any) -> tuple[int, Any]:
    if path == "/version":
        return 200, {"version": "0.99"}
    if path == "/v1/models":
        return 200, {"data": [{"id": "m", "max_model_len": 64}]}
    if path == "/v1/completions":
        assert body["return_token_ids"] is True and body["ignore_eos"] is True
        return 200, {"choices": [{"token_ids": [8, 9], "logprobs": {"token_logprobs": [-0.5, -0.25]},
                                  "finish_reason": "stop", "stop_reason": 9}]}
    return 404, {"detail": "Not Found"}


def sglang_like(path: str, body: Any) -> tuple[int, Any]:
    if path == "/get_server_info":
        return 200, {"version": "0.5", "context_length": 64}
    if path == "/generate":
        assert body["input_ids"] == PROMPT.tolist() and body["return_logprob"] is True
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": 9}, "prompt_tokens": 3,
            "weight_version": "default", "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]], "completion_tokens": 2, "cached_tokens": 0,
            "e2e_latency": 0.1,
        }
        return 200, {"text": " x", "output_ids": [8, 9], "meta_info": meta}
    return 404, {}


def with_change(base: Answer, at: str, change: Callable[[Any], tuple[int, Any]]) -> Answer:
    return lambda path, body: change(body) if path == at else base(path, body)


def complete(engine: Any, **sampling: Any) -> Generation:
    engine.add(GenerationRequest("r", PROMPT, Sampling(**{"max_tokens": 4} | sampling)))
    generations: list[Generation] = []
    wait_until(lambda: bool(generations.extend(engine.step()) or generations), 240, "the completion has come")
    return generations[0]


@pytest.fixture
def engine(serve: Callable[[Answer], str]) -> Iterator[Callable[..., Any]]:
    built = []

    def build(name: str, answer: Answer, **options: Any) -> Any:
        built.append(build_engine(name, serve(answer), vocab_size=100, **options))
        return built[-1]

    yield build
    for one in built:
        one.close()


@pytest.mark.parametrize(("name", "answer"), [("vllm_server", vllm_like), ("sglang_server", sglang_like)])
def test_ids_logprobs_and_reasons_come_through(engine: Any, name: str, answer: Answer) -> None:
    built = engine(name, answer)
    generation = complete(built)
    assert built.max_model_len == 64 and built.version
    assert generation.completion_ids.tolist() == [8, 9] and generation.logprobs.tolist() == [-0.5, -0.25]
    assert (generation.finish_reason, generation.stop_reason) == ("stop", "9")
    assert not built.has_unfinished()


def test_the_generate_address_is_used_where_the_server_has_it(engine: Any) -> None:
    def generate(body: Any) -> tuple[int, Any]:
        if not body["token_ids"]:
            return 400, {"error": {"message": "token_ids is empty"}}
        content = [{"token_id": 8, "logprob": -0.5}]
        choice = {"token_ids": [8], "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None}
        return 200, {"choices": [choice]}

    answer = with_change(vllm_like, "/inference/v1/generate", generate)
    generation = complete(engine("vllm_server", with_change(answer, "/v1/completions", lambda _: (500, {}))))
    assert generation.completion_ids.tolist() == [8] and generation.stop_reason == ""


def test_alternatives_come_from_each_form_of_answer(engine: Any) -> None:
    """The servers name two beside 8, which is not among them, and one beside 9."""
    asked: list[Any] = []

    def completions(body: Any) -> tuple[int, Any]:
        asked.append(body)
        top = [
            {"token_id:8": -1.5, "token_id:3": -0.25, "token_id:4": -0.75},
            {"token_id:9": -0.25, "token_id:1": -9999},
        ]
        _, reply = vllm_like("/v1/completions", body)
        reply["choices"][0]["logprobs"] = {"token_logprobs": [-1.5, -0.25], "top_logprobs": top}
        return 200, reply

    def generate(body: Any) -> tuple[int, Any]:
        if not body["token_ids"]:
            return 422, {"error": {"message": "token_ids is empty"}}
        asked.append(body["sampling_params"])
        entries = [[(8, -1.5), (3, -0.25), (4, -0.75)], [(9, -0.25), (1, -9999)]]
        told = [[{"token_id": one, "logprob": value} for one, value in entry] for entry in entries]
        content = [{**entry[0], "top_logprobs": entry} for entry in told]
        choice = {"token_ids": [8, 9], "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None}
        return 200, {"choices": [choice]}

    def sglang(body: Any) -> tuple[int, Any]:
        asked.append(body)
        _, reply = sglang_like("/generate", body)
        reply["meta_info"]["output_top_logprobs"] = [[[-0.25, 3, None], [-0.75, 4, None]], [[-0.25, 9, None]]]
        return 200, reply

    for name, answer in (
        ("vllm_server", with_change(vllm_like, "/v1/completions", completions)),
        ("vllm_server", with_change(vllm_like, "/inference/v1/generate", generate)),
        ("sglang_server", with_change(sglang_like, "/generate", sglang)),
    ):
        found = complete(engine(name, answer), alternatives=2)
        assert found.alternative_ids.tolist() == [3, 4, 9, 0] and found.entropy is None
        assert found.alternative_logprobs.tolist() == [-0.25, -0.75, -0.25, float("-inf")]
    assert asked[0]["logprobs"] == asked[1]["logprobs"] == 3 and asked[0]["return_tokens_as_token_ids"] is True
    assert asked[2]["top_logprobs_num"] == 2


def test_what_a_server_tells_beside_the_tokens_is_kept_and_what_does_not_fit_is_named(engine: Any) -> None:
    """vLLM's generate tells all of it, SGLang the versions; a name of the weights that nobody gave is none."""
    spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}]
    more: dict[str, Any] = {
        "sampling_mask": [[8, 3, 5], [9]], "weight_versions": spans, "routed_experts": None}

    def generate(body: Any) -> tuple[int, Any]:
        if not body["token_ids"]:
            return 422, {"error": {"message": "token_ids is empty"}}
        content = [{"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": [
            {"token": f"token_id:{token}", "logprob": -0.5}]} for token in (8, 9)]
        choice = {"token_ids": [8, 9], "logprobs": {"content": content}, "finish_reason": "length", **more}
        return 200, {"choices": [choice], "metrics": {"speculative_decoding": {"num_draft_tokens": 4}}}

    def sglang(body: Any) -> tuple[int, Any]:
        _, reply = sglang_like("/generate", body)
        reply["meta_info"]["weight_versions"] = spans
        return 200, reply

    vllm = engine("vllm_server", with_change(vllm_like, "/inference/v1/generate", generate))
    both = [["v1", 1], ["v2", 1]]
    found = complete(vllm)
    assert found.kept_set is not None and found.kept_set.tolist() == [3, 1] and found.policy_version == "v2"
    assert found.extra == {"metrics": {"speculative_decoding": {"num_draft_tokens": 4}}, "policy_versions": both}
    assert complete(vllm, alternatives=1).alternative_ids.tolist() == [8, 9]  # the names of servers before 0.32
    found = complete(engine("sglang_server", with_change(sglang_like, "/generate", sglang)))
    assert (found.policy_version, found.extra, found.kept_set) == ("v2", {"policy_versions": both}, None)
    more |= {"sampling_mask": [[8]], "weight_versions": [{"version": "default", "start": 0, "end": 2}]}
    found = complete(vllm)
    assert found.kept_set is None and found.policy_version == "" and "sampling_mask" in found.extra["left_out"]


@pytest.mark.parametrize(("name", "answer"), [("vllm_server", vllm_like), ("sglang_server", sglang_like)])
def test_a_server_that_returns_no_alternatives_is_told_so(engine: Any, name: str, answer: Answer) -> None:
    with pytest.raises(EngineError, match="returns no alternatives"):
        complete(engine(name, answer), alternatives=2)


def test_stop_texts_are_the_servers_to_find_and_no_token_is_cut(engine: Any) -> None:
    asked: list[Any] = []

    def noting(base: Answer, at: str) -> Answer:
        def answer(path: str, body: Any) -> tuple[int, Any]:
            if path == at:
                asked.append(body)
            return base(path, body)

        return answer

    complete(engine("vllm_server", noting(vllm_like, "/v1/completions")), stop=("</x>",))
    complete(engine("sglang_server", noting(sglang_like, "/generate")), stop=("</x>",))
    assert asked[0]["stop"] == ["</x>"] and asked[0]["include_stop_str_in_output"] is True
    assert asked[1]["sampling_params"]["stop"] == ["</x>"] and asked[1]["sampling_params"]["no_stop_trim"] is True
    complete(engine("vllm_server", noting(vllm_like, "/v1/completions")))
    assert "stop" not in asked[2]


def test_an_older_sglang_names_the_ids_beside_the_logprobs(engine: Any) -> None:
    meta = {"output_token_logprobs": [[-0.5, 8, "x"]], "finish_reason": {"type": "length", "length": 1}}
    answer = with_change(sglang_like, "/generate", lambda _: (200, {"text": "x", "meta_info": meta}))
    assert complete(engine("sglang_server", answer)).completion_ids.tolist() == [8]


def test_a_server_without_ids_is_told_so(engine: Any) -> None:
    choice = {"text": "x", "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    answer = with_change(vllm_like, "/v1/completions", lambda _: (200, {"choices": [choice]}))
    with pytest.raises(EngineError, match=r"returns no token ids.*upgrade the server"):
        complete(engine("vllm_server", answer))


def test_a_busy_server_is_asked_again(engine: Any) -> None:
    asked = []

    def busy(body: Any) -> tuple[int, Any]:
        asked.append(body)
        return (503, {"error": "busy"}) if len(asked) < 3 else vllm_like("/v1/completions", body)

    assert complete(engine("vllm_server", with_change(vllm_like, "/v1/completions", busy))).completion_ids.size == 2
    assert len(asked) == 3


def test_a_server_that_goes_away_and_comes_back_costs_nothing(serve: Callable[[Answer], str]) -> None:
    """The answer is asked for again, more often than the usual tries, until somebody listens at the address again."""
    url = serve(vllm_like)
    built: Any = build_engine("vllm_server", url, vocab_size=100, patience=60)
    gone: list[float] = []
    real = built._call

    async def away(path: str, body: Any = None, timeout: float = 0) -> Any:
        if len(gone) < 3 * http.TRIES:
            gone.append(timeout)
            raise ConnectionRefusedError("nobody listens")
        return await real(path, body)

    built._call = away
    assert complete(built).completion_ids.tolist() == [8, 9] and len(gone) == 3 * http.TRIES
    built.close()


@pytest.mark.parametrize("status", [0, 503])
def test_a_server_that_stays_away_is_given_up_when_patience_ends(engine: Any, status: int) -> None:
    asked: list[Any] = []

    def gone(body: Any) -> tuple[int, Any]:
        asked.append(body)
        return status or 200, {"error": "starting"}

    built = engine("vllm_server", with_change(vllm_like, "/v1/completions", gone), patience=0)
    if not status:
        built.url = "http://127.0.0.1:9"  # where nobody listens
    with pytest.raises(
        EngineError, match="503: starting" if status else r"cannot be reached.*4 tries.*Check that it runs"
    ):
        complete(built)
    assert len(asked) == (http.TRIES if status else 0)


@pytest.mark.parametrize(
    ("name", "base", "at", "reply"),
    [
        ("sglang_server", sglang_like, "/generate", {
            "text": "", "output_ids": [8],
            "meta_info": {"finish_reason": {"type": "abort", "message": "Abort by user", "status_code": None},
                          "output_token_logprobs": [[-0.5, 8, None]]}}),
        ("vllm_server", vllm_like, "/v1/completions", {
            "choices": [{"token_ids": [8], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "abort"}]}),
    ],
)
def test_a_completion_that_the_server_dropped_is_asked_for_again(
    engine: Any, name: str, base: Answer, at: str, reply: Any
) -> None:
    """Half a completion with the word abort is no completion: nobody may train on it as if the model had ended it."""
    dropped: list[Any] = []

    def drop(body: Any) -> tuple[int, Any]:
        dropped.append(body)
        return (200, reply) if len(dropped) == 1 else base(at, body)

    assert complete(engine(name, with_change(base, at, drop))).completion_ids.tolist() == [8, 9]
    assert len(dropped) == 2
    dropped.clear()
    built = engine(name, with_change(base, at, lambda _: (200, reply)), patience=0)
    with pytest.raises(EngineError, match=r"the server dropped it \(abort\)"):
        complete(built)


def test_an_aborted_request_is_dropped_at_an_sglang_server_by_its_name(engine: Any) -> None:
    ended, dropped = threading.Event(), []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/generate":
            ended.wait(240)
        if path == "/abort_request":
            dropped.append(body)
        return sglang_like(path, body)

    built = engine("sglang_server", answer)
    built.add(GenerationRequest("r.7", PROMPT, Sampling(max_tokens=4)))
    assert built.step() == []
    built.abort("r.7")
    assert dropped == [{"rid": "r.7"}] and not built.has_unfinished()
    ended.set()


def test_a_server_that_stays_broken_is_given_up_with_its_words(engine: Any) -> None:
    answer = with_change(vllm_like, "/v1/completions", lambda _: (500, {"error": {"message": "out of memory"}}))
    with pytest.raises(EngineError, match="HTTP 500: out of memory"):
        complete(engine("vllm_server", answer))


def test_a_long_answer_is_read_to_its_end_and_one_without_end_is_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long(body: Any) -> tuple[int, Any]:
        status, reply = vllm_like("/v1/completions", body)
        return status, {**reply, "prompt_text": "a" * (3 << 20)}

    built = engine("vllm_server", with_change(vllm_like, "/v1/completions", long))
    assert complete(built).completion_ids.tolist() == [8, 9]
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(RequestRefused, match="larger than 1 MB"):
        complete(built)


def test_a_refused_request_does_not_end_the_engine(engine: Any) -> None:
    answer = with_change(vllm_like, "/v1/completions", lambda _: (400, {"error": {"message": "bad ids"}}))
    built = engine("vllm_server", answer)
    with pytest.raises(RequestRefused, match="bad ids"):
        complete(built)
    assert not built.has_unfinished()


def test_a_refused_request_ends_no_other_one(serve: Callable[[Answer], str]) -> None:
    def some(body: Any) -> tuple[int, Any]:
        return (400, {"error": {"message": "bad ids"}}) if body["prompt"][0] % 2 else vllm_like("/v1/completions", body)

    url = serve(with_change(vllm_like, "/v1/completions", some))
    owner = EngineThread(lambda: build_engine("vllm_server", url, vocab_size=100))
    try:
        asked = [
            owner.submit(GenerationRequest(f"r{n}", ids_array([n, 6, 7]), Sampling(max_tokens=4))) for n in range(20)
        ]
        for n, future in enumerate(asked):
            if n % 2:
                with pytest.raises(RequestRefused, match="bad ids"):
                    future.result(60)
            else:
                assert future.result(60).completion_ids.tolist() == [8, 9]
    finally:
        owner.close()


@pytest.mark.parametrize("reply", [b"<html>", {}, {"choices": []}, {"choices": [3]}])
def test_nonsense_is_an_engine_error(engine: Any, reply: Any) -> None:
    with pytest.raises(EngineError):
        complete(engine("vllm_server", with_change(vllm_like, "/v1/completions", lambda _: (200, reply))))


def test_an_aborted_request_returns_nothing(engine: Any) -> None:
    ended = threading.Event()

    def slow(body: Any) -> tuple[int, Any]:
        ended.wait()
        return 500, {}

    built = engine("vllm_server", with_change(vllm_like, "/v1/completions", slow))
    built.add(GenerationRequest("r", PROMPT, Sampling(max_tokens=4)))
    assert built.step() == []
    built.abort("r")
    assert not built.has_unfinished() and built.step() == []
    ended.set()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://10.0.0.1:8000", "not allowed.*INSPECTOR_ENGINE_HOSTS"),
        ("file:///etc/passwd", "not a server address"),
        ("http://user:secret@localhost", "not a server address"),
        ("localhost:8000", "not a server address"),
    ],
)
def test_only_allowed_hosts_are_asked(url: str, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        build_engine("vllm_server", url, vocab_size=100)


def test_a_redirect_is_not_followed(engine: Any) -> None:
    with pytest.raises(EngineError, match="HTTP 302"):
        complete(engine("vllm_server", with_change(vllm_like, "/v1/completions", lambda _: (302, {}))))


def test_a_server_that_is_not_there(port: HeldPort) -> None:
    with pytest.raises(EngineError, match="No server answers"):
        build_engine("vllm_server", port.url, vocab_size=100)


def test_a_model_that_the_server_does_not_list(engine: Any) -> None:
    with pytest.raises(EngineError, match="does not list the model 'other'"):
        engine("vllm_server", vllm_like, model="other")


def scored_by_vllm(path: str, body: Any) -> tuple[int, Any]:
    if path == "/v1/completions":
        assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([5, 6, 7], 0, 1)
        entries = [None, {"6": {"logprob": -1.5}}, {"9": {"logprob": -0.1}, "7": {"logprob": -2.5}}]
        return 200, {"choices": [{"token_ids": [1], "prompt_logprobs": entries}]}
    return vllm_like(path, body)


def scored_by_generate(path: str, body: Any) -> tuple[int, Any]:
    if path == "/inference/v1/generate":
        if not body["token_ids"]:
            return 400, {"detail": "empty"}
        assert body["token_ids"] == [5, 6, 7] and body["sampling_params"]["prompt_logprobs"] == 0
        entries = [None, {"6": {"logprob": -1.5}}, {"7": {"logprob": -2.5}}]
        return 200, {"choices": [{"token_ids": [1]}], "prompt_logprobs": entries}
    return vllm_like(path, body)


def scored_by_sglang(path: str, body: Any) -> tuple[int, Any]:
    if path == "/generate":
        assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == ([5, 6, 7], 0, True)
        return 200, {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]]}}
    return sglang_like(path, body)


SCORED = [("vllm_server", scored_by_vllm), ("vllm_server", scored_by_generate), ("sglang_server", scored_by_sglang)]


@pytest.mark.parametrize(("name", "answer"), SCORED)
def test_a_server_scores_streams(engine: Any, name: str, answer: Answer) -> None:
    (scores,) = score_streams([PROMPT], engine(name, answer))
    assert np.isnan(scores[0]) and scores[1:].tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(
    "lacks", [{"choices": [{}]}, {"meta_info": {}}, {"choices": [{"prompt_logprobs": [None]}]}, []]
)
@pytest.mark.parametrize(
    ("name", "answer", "at"),
    [("vllm_server", vllm_like, "/v1/completions"), ("sglang_server", sglang_like, "/generate")],
)
def test_a_server_that_cannot_score_is_told_so(engine: Any, name: str, answer: Answer, at: str, lacks: Any) -> None:
    built = engine(name, with_change(answer, at, lambda body: (200, lacks)))
    with pytest.raises(EngineError, match="no log-probability for each token of a prompt"):
        score_streams([PROMPT], built)
    refusing = engine(name, with_change(answer, at, lambda body: (400, {"message": "no prompt_logprobs here"})))
    with pytest.raises(RequestRefused, match="no prompt_logprobs here"):
        score_streams([PROMPT], refusing)
