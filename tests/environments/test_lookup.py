import pytest

from rollouts.sampling.environments.lookup import Index, LookupEnvironment, Passage, mentions, read_corpus


@pytest.fixture(scope="module")
def environment():
    return LookupEnvironment()


def call(query):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "lookup", "arguments": {"query": query}}}]}


def test_every_question_is_answered_by_searching_for_it(environment):
    for task in environment.tasks(24, seed=0):
        (reply,) = environment.start(task).step(call(task.messages[-1]["content"])).messages
        assert mentions(reply["content"], task.answer), task


def test_a_right_answer_is_rewarded_and_a_wrong_one_is_not(environment):
    (task,) = environment.tasks(1, seed=1)
    for content, reward in ((f"It is {task.answer}.", 1.0), ("I do not know.", 0.0)):
        episode = environment.start(task)
        assert not episode.step(call("lighthouse")).done
        outcome = episode.step({"role": "assistant", "content": content})
        assert (outcome.done, outcome.reward, outcome.stop_reason) == (True, reward, "answered")


def test_an_answer_without_a_search_says_so(environment):
    (task,) = environment.tasks(1, seed=1)
    assert environment.start(task).step({"role": "assistant", "content": "Hm."}).stop_reason == "no_tool_call"


@pytest.mark.parametrize("arguments", [None, {}, {"query": 3}, {"query": "  "}, "query"])
def test_a_malformed_call_is_answered_with_an_error(environment, arguments):
    (task,) = environment.tasks(1, seed=1)
    message = {"tool_calls": [{"function": {"name": "lookup", "arguments": arguments}}]}
    (reply,) = environment.start(task).step(message).messages
    assert reply["content"].startswith("error: ")


def test_tasks_of_a_seed_are_repeatable_and_a_longer_list_starts_with_the_shorter(environment):
    assert environment.tasks(30, seed=3)[:10] == environment.tasks(10, seed=3)
    assert environment.tasks(10, seed=3) != environment.tasks(10, seed=4)


def test_mentions_wants_whole_words():
    assert mentions("It was Ida Vance.", "ida vance")
    assert not mentions("It is 145 metres.", "45")


def test_a_search_without_a_shared_word_finds_nothing():
    index = Index([Passage("the cat sat"), Passage("whales swim")])
    assert index.search("whales") == ["whales swim"]
    assert index.search("zeppelin") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "line 1: not JSON"), ('{"no": 1}', 'named "text"'), ('{"text": "x"}', "nothing to ask")],
)
def test_a_bad_corpus_names_the_line(tmp_path, text, reason):
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_corpus(path)
