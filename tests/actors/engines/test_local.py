"""What the embedded engine adds to the contract: reuse between turns, bounded memory, and models that it refuses."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from troupe.actors.engines import local, sampling, stepping
from troupe.actors.engines.local import LocalEngine
from troupe.actors.engines.scoring import Scoring
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, RemoteError, TaskFailed
from troupe.protocol.messages import Generate, Generated, Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


async def ready(load: Any = build, **limits: Any) -> LocalEngine:
    engine = LocalEngine(load, **limits)
    await engine.start()
    await engine.load_weights(0, tensors_of(load()))
    return engine


def turn(engine: LocalEngine, session: str, prompt: Any, max_tokens: int = 5) -> Any:
    return engine.generate(Generate("r", session, np.asarray(prompt, np.int32), Sampling(max_tokens=max_tokens)))


def fed(engine: LocalEngine) -> int:
    return int(engine.stats()["fed"])


def test_a_session_feeds_only_what_is_new_until_it_ends() -> None:
    async def go() -> None:
        engine = await ready()
        first = list(range(30))
        said = await turn(engine, "s", first)
        assert fed(engine) == 30 + 4  # the last token sampled was never fed
        second = [*first, *said.tokens, 7, 8, 9]
        said = await turn(engine, "s", second)
        assert fed(engine) == 34 + (1 + 3) + 4
        await engine.end_session("s")
        before = fed(engine)
        await turn(engine, "s", second)
        assert fed(engine) == before + 38 + 4
        await engine.end_session("s")
        before = fed(engine)
        await turn(engine, "", second)
        await turn(engine, "", second)
        assert fed(engine) == before + 2 * (38 + 4)  # no session, nothing kept
        await engine.close()

    asyncio.run(go())


def test_a_session_that_ends_during_its_turn_is_not_kept() -> None:
    async def go() -> None:
        engine = await ready()
        call = asyncio.ensure_future(turn(engine, "s", [1, 2, 3], max_tokens=50))
        await asyncio.sleep(0)
        await engine.end_session("s")
        await call
        assert engine.stats()["sessions"] == 0
        await engine.close()

    asyncio.run(go())


def test_the_session_used_least_recently_makes_room() -> None:
    async def go() -> None:
        engine = await ready(max_cached_tokens=4 * 256)
        prompts = {name: [i] * 40 for i, name in enumerate("abcd")}
        for name, prompt in prompts.items():
            await turn(engine, name, prompt)
        await turn(engine, "a", prompts["a"])
        await turn(engine, "e", [9] * 40)
        assert engine.stats()["sessions"] == 4
        before = fed(engine)
        await turn(engine, "a", prompts["a"])
        assert fed(engine) == before + 1 + 4  # kept: only the last token of the prompt is computed again
        before = fed(engine)
        await turn(engine, "b", prompts["b"])
        assert fed(engine) == before + 40 + 4  # went for e
        await engine.close()

    asyncio.run(go())


def test_weights_that_change_free_what_was_kept_for_sessions() -> None:
    async def go() -> None:
        engine = await ready()
        await turn(engine, "s", [1, 2, 3])
        assert engine.stats()["sessions"] == 1
        await engine.load_weights(1, tensors_of(build()))
        assert engine.stats()["sessions"] == 0
        await engine.close()

    asyncio.run(go())


@pytest.mark.parametrize("work", ["beside", "checksum_of"])
def test_sampling_goes_on_while_new_weights_are_copied_and_summed(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = build()
    with torch.no_grad():
        next(new.parameters()).add_(0.5)
    sampled_meanwhile = threading.Event()
    real = getattr(local, work)

    def long(*arguments: Any) -> Any:
        assert sampled_meanwhile.wait(60), "nothing is sampled while weights are on their way"
        return real(*arguments)

    async def go() -> None:
        engine = await ready()
        monkeypatch.setattr(local, work, long)
        running = asyncio.ensure_future(turn(engine, "s", [1, 2, 3], max_tokens=900))
        loading = asyncio.ensure_future(engine.load_weights(1, tensors_of(new)))
        before = engine.stats()["tokens"]
        while engine.stats()["tokens"] < before + 20:
            await asyncio.sleep(0.001)
        assert engine.version == 0 and not loading.done()
        sampled_meanwhile.set()
        held = await loading
        assert engine.version == 1 and held == checksum_of(tensors_of(new)) == checksum_of(tensors_of(engine._stepper.model))
        await engine.abort("r")
        versions = (await running).versions.tolist()
        assert versions == sorted(versions) and versions[0] == 0
        await engine.close()

    asyncio.run(go())


def test_a_long_prompt_does_not_hold_up_those_who_are_sampling() -> None:
    async def go() -> None:
        engine = await ready(lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 8192})).eval())
        finished: list[str] = []

        async def one(name: str, prompt: list[int], max_tokens: int) -> None:
            await turn(engine, "", prompt, max_tokens=max_tokens)
            finished.append(name)

        await asyncio.gather(one("six tokens", [1], 6), one("long prompt", [1] * 8000, 1))
        assert finished == ["six tokens", "long prompt"]
        await engine.close()

    asyncio.run(go())


def test_more_work_than_memory_waits_its_turn() -> None:
    async def go() -> list[Generated]:
        engine = await ready(max_cached_tokens=600, max_running=64)
        prompts = [[i % 50] * (20 + 30 * (i % 15)) for i in range(30)]
        results = await asyncio.gather(*(turn(engine, str(i), p, max_tokens=8) for i, p in enumerate(prompts)))
        with pytest.raises(TaskFailed, match="600"):
            await turn(engine, "", [1] * 600)
        await engine.close()
        return results

    assert [len(got.tokens) for got in asyncio.run(go())] == [8] * 30


async def test_a_sliding_window_is_the_context() -> None:
    """300 tokens are in the window, though the cache's capacity is not: whatever is fed, nothing dies in the middle."""

    def mistral() -> torch.nn.Module:
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=300)).eval()

    engine = await ready(mistral)
    prompt = np.arange(280) % 50
    said = await turn(engine, "", prompt, max_tokens=100)
    assert (len(said.tokens), said.finish) == (20, "length")
    (scored,) = await engine.score([np.concatenate([prompt, said.tokens])])
    np.testing.assert_allclose(scored[-20:], said.logprobs, atol=1e-4)
    with pytest.raises(TaskFailed, match="context of 300"):
        await turn(engine, "", np.arange(300) % 50)
    assert len((await turn(engine, "", [1, 2, 3])).tokens) == 5
    await engine.close()


async def test_a_model_that_breaks_fails_every_request_and_all_later_calls() -> None:
    class Breaks(LlamaForCausalLM):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += "feed" in kwargs
            if self.calls > 3 + 3:  # three of them try the model
                raise ZeroDivisionError("a bit flipped")
            return super().forward(*args, **kwargs)

    engine = await ready(lambda: Breaks(LlamaConfig(**SIZES)), generator_name="generator-3", max_running=4)
    calls = [turn(engine, "", [1, 2], max_tokens=400) for _ in range(8)]
    streamed = anext(engine.stream(Generate("r", "", np.asarray([1], np.int32), Sampling(max_tokens=400), 0)))
    scored = engine.score([np.arange(50) for _ in range(300)])
    outcomes = await asyncio.gather(*calls, scored, return_exceptions=True)
    outcomes += await asyncio.gather(streamed, engine.check(), engine.pause("abort"), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, RemoteError)
        assert "generator-3" in str(outcome) and "ZeroDivisionError: a bit flipped" in str(outcome)
    for call in turn(engine, "", [1, 2]), engine.load_weights(2, tensors_of(build())):
        with pytest.raises(RemoteError, match="a bit flipped"):
            await call


async def test_in_a_pause_requests_can_be_aborted_ids_scored_and_the_engine_closed() -> None:
    engine = await ready(max_running=1)
    calls = [asyncio.ensure_future(turn(engine, "", [1, 2, 3], max_tokens=900)) for _ in range(3)]
    while not engine.stats()["tokens"]:
        await asyncio.sleep(0.001)
    await engine.pause("in_place")
    before = engine.stats()["tokens"]
    assert len((await engine.score([np.arange(9)]))[0]) == 8
    await engine.pause("retract")
    await engine.abort("r")
    assert [(got.finish, len(got.tokens)) for got in await asyncio.gather(*calls)] == [
        ("abort", int(before)),
        ("abort", 0),
        ("abort", 0),
    ]
    waits = asyncio.ensure_future(turn(engine, "", [1, 2, 3]))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="in_place, retract, abort"):
        await engine.pause("sleep")  # type: ignore[arg-type]
    await engine.close()
    assert (await waits).finish == "abort" and engine.stats()["tokens"] == before


async def test_a_retracted_request_is_fed_again_and_one_in_place_is_not() -> None:
    engine = await ready()
    for mode, again in ("in_place", False), ("retract", True):
        call = asyncio.ensure_future(turn(engine, "", [1, 2, 3], max_tokens=900))
        while not engine.stats()["tokens"]:
            await asyncio.sleep(0.001)
        await engine.pause(mode)
        before, sampled = fed(engine), int(engine.stats()["tokens"])
        await engine.resume()
        while engine.stats()["tokens"] < sampled + 5:
            await asyncio.sleep(0.001)
        await engine.abort("r")
        more = len((await call).tokens) - sampled
        assert fed(engine) - before == more + (3 + sampled - 1) * again
        await engine.close()
        engine = await ready()
    await engine.close()


async def test_scores_are_all_of_the_same_weights_though_these_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> torch.nn.Module:
        torch.manual_seed(1)
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()

    engine = await ready()
    sequences = [np.random.default_rng(i).integers(0, 50, 60) for i in range(40)]
    steps: list[Scoring] = []
    step = Scoring.step

    def steps_and_tells(scoring: Scoring, *how: Any) -> Any:
        steps.append(scoring)
        if len(steps) == 2:  # the first part is scored; the new weights are next in the inbox
            loading = asyncio.run_coroutine_threadsafe(engine.load_weights(1, tensors_of(other())), loop)
            deadline = time.monotonic() + 60
            while engine._stepper._inbox.empty() and time.monotonic() < deadline:  # they are copied on another thread
                time.sleep(0.001)
            assert not loading.done()
        return step(scoring, *how)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Scoring, "step", steps_and_tells)
    got = await engine.score(sequences)
    assert len(steps) == 2 + 40 * 59 // 256 + 1  # the first two were for nothing
    for ids, scores in zip(sequences, got, strict=True):
        np.testing.assert_allclose(scores, _scores(other(), ids).numpy(), atol=1e-4)
    await engine.close()


@torch.no_grad()
def _scores(model: Any, ids: Any) -> torch.Tensor:
    ids = torch.tensor(ids)
    return model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


async def test_closing_fails_a_score_on_its_way() -> None:
    engine = await ready()
    scoring = asyncio.ensure_future(engine.score([np.arange(50)] * 2000))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(ActorLost, match="closed"):
        await scoring


class Rounded(LlamaForCausalLM):
    """A model whose logits are off by up to .1, depending on all that is fed together, as rounding does."""

    def forward(self, input_ids: torch.Tensor, **how: Any) -> Any:
        answer = super().forward(input_ids=input_ids, **how)
        dice = torch.Generator().manual_seed(hash(tuple(input_ids[0].tolist())) % 2**63)
        answer.logits = answer.logits + 0.1 * (2 * torch.rand(answer.logits.shape, generator=dice) - 1)
        return answer


@pytest.mark.parametrize(
    "settings", [Sampling(max_tokens=9), Sampling(max_tokens=9, top_k=5, top_p=0.7), Sampling(0.0, max_tokens=9)]
)
def test_a_steady_engine_draws_the_same_whatever_the_company_rounds(settings: Sampling, monkeypatch: Any) -> None:
    monkeypatch.setattr(stepping, "_ROUNDING", 0.2)
    monkeypatch.setattr(stepping.alone, "check", lambda *_, **__: None)  # such a model would not be taken

    async def drawn(steady: bool, order: list[int]) -> list[list[int]]:
        engine = LocalEngine(lambda: Rounded(LlamaConfig(**SIZES)), steady=steady, max_running=9)
        await engine.start()
        await engine.load_weights(0, tensors_of(build()))
        asked = [Generate(f"{i}", "", np.arange(1 + i % 7, dtype=np.int32), settings, seed=i) for i in range(16)]
        got = await asyncio.gather(*(engine.generate(asked[i]) for i in order))
        await engine.close()
        return [made.tokens.tolist() for _, made in sorted(zip(order, got, strict=True), key=lambda pair: pair[0])]

    there, back = list(range(16)), list(range(15, -1, -1))
    assert asyncio.run(drawn(True, there)) == asyncio.run(drawn(True, back))
    assert asyncio.run(drawn(False, there)) != asyncio.run(drawn(False, back)), "nothing was close: the test proves nothing"


def test_a_draw_is_close_where_the_next_token_or_the_next_choice_of_tokens_begins() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    def close(u: float, noise: float = 1e-3, **settings: Any) -> bool:
        return sampling.close(logits, [Sampling(**settings)], np.array([u]), noise) == [0]

    assert close(0.4999) and close(0.5001) and close(0.8) and not close(0.4) and not close(0.999999) and not close(0.0)
    assert not close(0.4999, temperature=0.0) and close(0.1, noise=0.26, temperature=0.0)  # ln(.5/.3) / 2 = .255
    assert close(0.1, top_p=0.8) and close(0.1, top_p=0.5001) and not close(0.1, top_p=0.6)
    assert not close(0.1, top_k=2) and close(0.1, noise=0.21, top_k=2)  # ln(.3/.2) / 2 = .203
    first = 0.5**10 / (0.5**10 + 0.3**10 + 0.2**10)
    assert close(first - 0.009, temperature=0.1) and not close(first - 0.011, temperature=0.1)  # ten times the noise


def test_the_top_uniform_number_still_draws_a_token_of_the_support() -> None:
    logits = torch.full((1, 7), -1e30)
    logits[0, 2], logits[0, 4] = 3.0, 1.0
    for u in (0.0, 1 - 2.0**-32):
        (token,), (logprob,) = sampling.sample(logits, [Sampling()], np.array([u]))
        assert token == (2 if u == 0 else 4)
        assert logprob == pytest.approx(float(logits[0, [2, 4]].log_softmax(-1)[0 if u == 0 else 1]))


def test_uniform_numbers_are_those_of_the_seed_and_any_integer_is_a_seed() -> None:
    for seed in (0, -5, 2**63, 2**70):
        one, two = sampling.uniforms(seed, 10, 8), sampling.uniforms(seed, 10, 8)
        assert (one == two).all() and (one >= 0).all() and (one < 1).all()
    assert (sampling.uniforms(1, 10, 8) != sampling.uniforms(1, 11, 8)).all()
    assert (sampling.uniforms(1, 10, 8) == sampling.uniforms(1, 10, 20)[:8]).all()  # max_tokens changes no draw


async def test_a_stop_string_ends_a_turn_with_the_token_in_which_it_is_complete() -> None:
    engine = await ready(decode=lambda ids: "".join(f"<{id_}>" for id_ in ids))
    free = await turn(engine, "", [1, 2, 3], max_tokens=20)
    inside = f"{free.tokens[3]}>"[-2:]  # the string ends inside of what the token says
    first = next(n for n, id_ in enumerate(free.tokens) if inside in f"<{id_}>")
    request = Generate("r", "", np.asarray([1, 2, 3], np.int32), Sampling(max_tokens=20, stop=[inside, "never said"]))
    cut = await engine.generate(request)
    assert cut.tokens.tolist() == free.tokens[: first + 1].tolist() and cut.finish == "stop"
    assert len(cut.logprobs) == len(cut.versions) == first + 1
    await engine.close()


async def test_a_stop_string_without_a_tokenizer_is_refused_not_ignored() -> None:
    engine = await ready()
    with pytest.raises(ConfigError, match="without a tokenizer"):
        await engine.generate(Generate("r", "", np.asarray([1], np.int32), Sampling(max_tokens=2, stop=["x"])))
    await engine.close()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_logits_that_are_no_numbers_are_an_error_whatever_is_cut_from_them(settings: dict[str, Any]) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = torch.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        sampling.sample(logits, [Sampling(**settings)] * 2, np.array([0.3, 0.3]))
