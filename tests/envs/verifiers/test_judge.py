"""A judge over real HTTP: what it is asked, how its reply is read, and that no score is never a zero."""

import asyncio

import pytest

from troupe.envs.verifiers import Judge
from troupe.envs.verifiers.judge import read
from troupe.protocol.errors import ConfigError, EnvironmentFailed

PROMPT = "Question: {question}\n<answer>{answer}</answer>\nIs it right?"


@pytest.fixture
def judged(endpoint):
    def ask(said, *replies, **options):
        with endpoint(*replies) as (url, asked):
            options = {"retries": 0, **options}
            judge = Judge(PROMPT, model="m", base_url=url, values={"question": "1 + 1?"}, api_key="key", **options)
            return asyncio.run(judge(said)), asked

    return ask


def test_the_judge_is_asked_with_the_prompt_and_its_last_line_is_the_score(judged):
    score, [(path, body, headers)] = judged("{2}", "It is even.\n**Yes.**")
    assert (score, path, headers["authorization"]) == (1, "/v1/chat/completions", "Bearer key")
    assert body["messages"][1]["content"].startswith("Question: 1 + 1?\n<answer>{2}</answer>\nIs it right?\n\nEnd with a line")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 512)
    score, [(_, body, _)] = judged({"said": 2}, "0.25", scale="number")
    assert score == 0.25 and '<answer>{"said": 2}</answer>' in body["messages"][1]["content"]
    assert judged("2", "three words here", scale=lambda reply: len(reply.split()) / 4)[0] == 0.75


@pytest.mark.parametrize(
    ("reply", "yes_no", "number"),
    [
        ("yes", 1, None),
        ("I doubt it, yes.\n\nNO\n", 0, None),
        ("**Verdict:** yes", 1, None),
        ("Final answer: no.", 0, None),
        ("yes, but", None, None),
        ("yes\nbut", None, None),
        ("<think>no</think>yes", 1, None),
        ("<think>yes", None, None),
        ("Score: 0.5", None, 0.5),
        ("`.5`", None, 0.5),
        ("1.", None, 1),
        ("1.5", None, None),
        ("-1", None, None),
        ("nan", None, None),
        ("", None, None),
    ],
)
def test_a_reply_is_read_strictly(reply, yes_no, number):
    assert (read(reply, "yes_no"), read(reply, "number")) == (yes_no, number)


def test_a_reply_without_a_score_is_asked_for_again_and_a_failing_request_too_but_not_for_ever(judged):
    score, asked = judged("2", "hm", "no")
    assert score == 0 and len(asked) == 2
    score, asked = judged("2", 500, "yes", retries=1)
    assert score == 1 and len(asked) == 2
    with pytest.raises(EnvironmentFailed, match=r"judge m gave no score in 3 replies, last: 'hm'"):
        judged("2", "hm", attempts=3)


def test_no_score_is_a_broken_episode_and_never_a_zero(endpoint, judged):
    with pytest.raises(EnvironmentFailed, match=r"judge m at http://127\.0\.0\.1.*InternalServerError.*not now"):
        judged("2", 500)
    with pytest.raises(EnvironmentFailed, match=r"judge m has given no score for 0\.3 s"):
        judged("2", None, timeout_s=0.3)
    with endpoint("yes") as (url, _):
        pass
    with pytest.raises(EnvironmentFailed, match="APIConnectionError"):
        asyncio.run(Judge("{answer}", model="m", base_url=url, retries=0)("2"))
    with pytest.raises(EnvironmentFailed, match="not a finite number"):
        judged("2", "x", scale=lambda reply: float("nan"))


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ("Is it right?", {}, "no {answer}"),
        ("{answer} {question}", {}, r"{question} has no value: give values={'question': …}"),
        ("{answer}", {"values": {"question": "?"}}, "{question} is not in the prompt"),
        ("{answer} {", {}, "is no template"),
        ("{answer}", {"scale": "maybe"}, "yes_no, number or a function"),
        ("{answer}", {"attempts": 0}, "at least 1"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_when_the_judge_is_made(prompt, options, reason):
    with pytest.raises(ConfigError) as error:
        Judge(prompt, model="m", base_url="http://127.0.0.1:1/v1", **options)
    assert reason in str(error.value)
