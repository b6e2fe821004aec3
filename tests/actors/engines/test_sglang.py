"""What the SGLang engine promises beyond the contract of all engines, on real servers; and what it refuses without one."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.servers import SGLANG, START_S, SharedSGLang, below
from tests.actors.engines.suite import (
    ENGINES,
    assert_true,
    llama,
    llama_with_lora,
    logits_of,
    random_ids,
    request,
    sampled,
    started,
)
from troupe.actors.engines import served
from troupe.actors.engines.server import free_port
from troupe.actors.engines.sglang import SGLangEngine
from troupe.actors.engines.sglang_wire import Wire
from troupe.actors.settings import RunConfig
from troupe.learner.config import LoraSettings, ModelConfig
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, RemoteError, TimedOut, TroupeError
from troupe.protocol.messages import Generated

real, PYTHON = SGLANG, SGLANG.python

KIND = ENGINES["sglang"]


def _folder(path: Path) -> ModelConfig:
    model: Any = llama(0)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return ModelConfig(path=str(path))


def _own(tmp_path: Path, **more: Any) -> SGLangEngine:
    """An engine with a server of its own, which a test may hurt."""
    model = _folder(tmp_path / "model")
    return SGLangEngine(model, python=PYTHON, max_running=16, start_s=START_S, log=tmp_path / "server.log", **more)


async def _soon(what: Awaitable[Any]) -> Any:
    async with asyncio.timeout(60):
        return await what


def _part(got: Generated, chosen: Any) -> Generated:
    return Generated(got.tokens[chosen], got.logprobs[chosen], got.versions[chosen], got.finish)


# -- weights -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _after_keeping(old: Any, new: Any, prompt: Any, tokens: Any, changed: int) -> Any:
    """Logprobs of tokens[changed:] under `new`, with the keys and values that `old` computed for all that it was fed."""
    ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.int64)
    fed = len(prompt) + changed - 1  # the last token of the old weights was sampled, not fed
    past = old(input_ids=ids[None, :fed], use_cache=True).past_key_values
    logits = new(input_ids=ids[None, fed:-1], past_key_values=past, use_cache=True).logits[0].float()
    return logits.log_softmax(-1).gather(-1, ids[fed + 1 :, None])[:, 0].numpy()


@real
@pytest.mark.parametrize("on_update", ["retract", "in_place"])
@pytest.mark.parametrize("transport", ["tensors", "disk"])
async def test_weights_change_amid_64_requests_and_every_token_is_of_the_version_it_names(
    on_update: str, transport: str
) -> None:
    old, new = llama(1), llama(2)
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(3, 80, 64)]
    engine = SharedSGLang(lambda: llama(0), on_update=on_update, transport=transport)
    await engine.start()
    try:
        assert await engine.load_weights(1, tensors_of(old)) == checksum_of(tensors_of(old))
        calls = [
            asyncio.ensure_future(engine.generate(request(p, name=str(i), seed=i, max_tokens=150 + i)))
            for i, p in enumerate(prompts)
        ]
        await sampled(engine, 64 * 40)
        assert await engine.load_weights(2, tensors_of(new)) == checksum_of(tensors_of(new))
        results = await asyncio.gather(*calls)
    finally:
        await engine.close()
    both = 0
    for i, (prompt, got) in enumerate(zip(prompts, results, strict=True)):
        changed = int((got.versions == 1).sum())
        assert got.versions.tolist() == [1] * changed + [2] * (150 + i - changed)
        both += 0 < changed < 150 + i
        assert_true(KIND, old, prompt, _part(got, slice(changed)))
        if changed == len(got.tokens) or (on_update == "in_place" and changed == 0):
            continue  # it was through, or waited at the server and may share keys and values that the old weights computed
        if on_update == "retract":
            after = logits_of(new, prompt, got.tokens).log_softmax(-1)
            expected = after.gather(-1, torch.tensor(got.tokens, dtype=torch.int64)[:, None])[changed:, 0].numpy()
        else:
            expected = _after_keeping(old, new, prompt, got.tokens, changed)
        np.testing.assert_allclose(got.logprobs[changed:], expected, atol=1e-4)
    assert both > 32, "the change was to come amid the requests"


@real
async def test_the_checksum_is_of_the_memory_of_the_server_and_changes_with_a_single_weight() -> None:
    model = llama(1)
    async with started(KIND, model) as engine:
        sent = checksum_of(tensors_of(model))
        assert isinstance(engine, SGLangEngine) and engine._wire is not None
        assert await engine._wire.held(60) == sent
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
            with torch.no_grad():
                changed = dict(model.named_parameters())[name].detach().clone()
                changed.view(-1)[-1] += 1e-3
            await engine._wire.send_tensors(1, [(name, changed)], flush=True, limit_s=60)  # behind the engine's back
            assert await engine._wire.held(60) == checksum_of(tensors_of(model) | {name: changed.numpy()})
            assert await engine._wire.held(60) != sent
            assert await engine.load_weights(1, tensors_of(model)) == sent
        await engine._wire.call("/weights_checker", {"action": "reset_tensors"})
        assert await engine._wire.held(60) != sent


@real
@pytest.mark.parametrize("transport", ["tensors", "disk"])
async def test_an_adapter_is_proved_over_its_base_from_the_memory_of_the_server(transport: str) -> None:
    model, other = llama_with_lora(1), llama_with_lora(2)
    sent = checksum_of(tensors_of(model))
    engine = SharedSGLang(lambda: llama_with_lora(0), transport=transport)
    await engine.start()
    try:
        assert await engine.load_weights(1, tensors_of(model)) == sent
        assert engine._wire is not None
        proof = await engine._wire.held(60)
        assert proof.startswith(f"{sent} over ")
        await engine._wire.call("/weights_checker", {"action": "reset_tensors"})  # behind the engine's back
        with pytest.raises(RemoteError, match="is not its base with the adapter"):
            await engine._wire.held(60)
        with pytest.raises(RemoteError, match=f"an adapter over the base .*; it is {proof.rpartition(' ')[2]}"):
            await engine.load_weights(2, tensors_of(other))
        with pytest.raises(RemoteError, match="over the base"):
            await engine.generate(request([1, 2]))
    finally:
        await engine.close()


@real
async def test_what_the_cache_holds_of_old_weights_is_used_by_no_later_request() -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(1), 200)
    for on_update in ("retract", "in_place"):
        engine = SharedSGLang(lambda: llama(0), on_update=on_update)
        await engine.start()
        try:
            for version, model in ((1, old), (2, new), (3, old)):
                await engine.load_weights(version, tensors_of(model))
                for _ in range(2):
                    assert_true(KIND, model, prompt, await engine.generate(request(prompt, max_tokens=6)))
        finally:
            await engine.close()


# -- requests ----------------------------------------------------------------------------------------------------------


@real
async def test_top_k_with_top_p_is_refused_and_either_alone_is_told_as_drawn() -> None:
    model = llama(1)
    async with started(KIND, model) as engine:
        with pytest.raises(ConfigError, match=r"top_k = 8 and top_p = 0\.7 together"):
            await engine.generate(request([1, 2], top_k=8, top_p=0.7))
        got = await engine.generate(request([1, 2], top_k=1, top_p=1.0, max_tokens=5))
        np.testing.assert_allclose(got.logprobs, np.zeros(5), atol=1e-6)  # one token was left


@real
async def test_a_stream_tells_versions_with_each_piece_and_leaving_it_aborts_the_request() -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(2), 12)
    async with started(KIND, old) as engine:
        versions: list[int] = []
        async for piece in engine.stream(request(prompt, max_tokens=4000)):
            versions += piece.versions.tolist()
            if len(versions) >= 5 and engine.version == 1:
                assert set(versions) == {1}
                await engine.load_weights(2, tensors_of(new))
            if len(versions) > 20:
                break
        assert versions[:5] == [1] * 5 and versions[-1] == 2 and versions == sorted(versions)
        assert_true(KIND, new, prompt, await engine.generate(request(prompt, max_tokens=4)))
        assert engine.stats()["load"] == 0


@real
async def test_in_a_long_pause_silence_is_no_sign_of_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "SILENT_S", 20.0)
    monkeypatch.setattr(served, "_LOOK_S", 1.0)
    async with started(KIND, llama(1)) as engine:
        going = asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=300)))
        await sampled(engine, 10)
        await engine.pause("in_place")
        await asyncio.sleep(25.0)
        await engine.resume()
        assert (await _soon(going)).finish == "length"


@real
async def test_a_server_whose_client_died_in_a_pause_serves_the_next_one() -> None:
    async with started(KIND, llama(1)) as engine:
        await engine.pause("in_place")
    async with started(KIND, llama(1)) as engine:
        assert (await _soon(engine.generate(request([1, 2], max_tokens=3)))).finish == "length"


@real
async def test_a_stop_string_cuts_the_turn_at_the_token_in_which_it_is_complete() -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(5), 10)

    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("A") + i) for i in ids)

    engine = SharedSGLang(lambda: llama(0), decode=decode)
    await engine.start()
    try:
        await engine.load_weights(1, tensors_of(model))
        free = await engine.generate(request(prompt, seed=3, max_tokens=30))
        stop = decode(free.tokens.tolist())[10:13]
        got = await engine.generate(request(prompt, seed=3, max_tokens=30, stop=[stop]))
        assert (got.finish, got.tokens.tolist()) == ("stop", free.tokens[:13].tolist())
        assert_true(KIND, model, prompt, got)
    finally:
        await engine.close()


# -- servers that break ------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("victim", ["sglang_inside.py", "sglang::scheduler"])
async def test_a_killed_server_fails_what_is_in_flight_with_a_typed_error_and_nothing_hangs(
    tmp_path: Path, victim: str
) -> None:
    engine = _own(tmp_path, generator_name="generator-7")
    await engine.start()
    try:
        assert engine._server is not None
        await engine.load_weights(1, tensors_of(llama(1)))
        calls = [asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=4000))) for _ in range(20)]
        await sampled(engine, 50)
        family = below(engine._server.pid)
        hit = [pid for pid, command in family.items() if victim in command]
        assert hit, family
        os.kill(hit[0], signal.SIGKILL)
        for outcome in await _soon(asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(outcome, ActorLost) and "generator-7" in str(outcome)
        for later in (engine.generate(request([1, 2])), engine.load_weights(2, tensors_of(llama(2))), engine.check()):
            with pytest.raises(ActorLost, match="generator-7"):
                await _soon(later)
        await _soon(engine.close())
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    finally:
        await engine.close()


@real
async def test_weights_that_diverged_are_an_error_not_a_token(tmp_path: Path) -> None:
    model: Any = llama(1)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    engine = _own(tmp_path)
    await engine.start()
    try:
        await engine.load_weights(1, tensors_of(model))
        with pytest.raises(RemoteError, match="diverged"):
            await _soon(engine.generate(request([1, 2])))
    finally:
        await engine.close()


OWNER = """
import asyncio, sys, time
from pathlib import Path
from troupe.actors.engines.sglang import SGLangEngine
from troupe.learner.config import ModelConfig
async def go():
    folder, python, limit_s = sys.argv[1:]
    engine = SGLangEngine(ModelConfig(path=folder), python=python, start_s=float(limit_s), log=Path(folder) / "log")
    await engine.start()
    print("up", flush=True)
    time.sleep(600)
asyncio.run(go())
"""


@real
def test_a_server_is_gone_when_its_owner_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, _folder(tmp_path).path, PYTHON, str(START_S)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"up\n"
        family = below(owner.pid)
        assert any("scheduler" in command for command in family.values()), family
        owner.kill()
        deadline = time.monotonic() + 30
        while (left := [pid for pid in family if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@real
async def test_a_server_that_is_still_starting_is_gone_when_its_keeper_is_killed(tmp_path: Path) -> None:
    """As Ray does to the children of a worker that died."""
    engine = _own(tmp_path)
    start = asyncio.ensure_future(engine.start())
    try:
        while engine._server is None or not any("spawn" in command for command in below(engine._server.pid).values()):
            assert not start.done()
            await asyncio.sleep(0.1)
        family = below(engine._server.pid)
        os.kill(engine._server.pid, signal.SIGKILL)
        with pytest.raises(ConfigError, match="killed by signal 9"):
            await start
        async with asyncio.timeout(60):
            while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
                await asyncio.sleep(0.1)
        assert not left
    finally:
        await engine.close()


@real
async def test_a_start_that_takes_too_long_names_its_limit_and_leaves_nothing(tmp_path: Path) -> None:
    engine = SGLangEngine(_folder(tmp_path / "m"), python=PYTHON, start_s=1.0, log=tmp_path / "log")
    with pytest.raises(TimedOut, match="has not started within 1 s"):
        await engine.start()
    assert engine._server is not None and not engine._server.alive
    with pytest.raises(TimedOut, match="within 1 s"):
        await engine.generate(request([1]))


# -- without a server --------------------------------------------------------------------------------------------------


async def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    model = _folder(tmp_path / "m")
    tied = model.model_copy(update={"lora": LoraSettings(targets=["lm_head"])})
    cases: list[tuple[SGLangEngine, type[TroupeError], str]] = [
        (SGLangEngine(ModelConfig(path="nowhere")), ConfigError, "'nowhere' does not exist"),
        (SGLangEngine(tied), ConfigError, "'lm_head' cannot be merged"),
        (SGLangEngine(model, url=f"http://127.0.0.1:{free_port()}", start_s=0.3), TimedOut, r"sglang_url .* for 0\.3 s"),
    ]
    for engine, error, says in cases:
        with pytest.raises(error, match=says):
            await engine.start()
        await engine.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rollout": {"top_k": 20, "top_p": 0.9}}, "top_k or top_p, not both"),
        ({"generator": {"engine": "sglang", "sglang_url": "http://h:1", "replicas": 2}}, "2 replicas need one each"),
    ],
)
def test_a_recipe_that_sglang_cannot_run_is_refused_when_it_is_read(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RunConfig.model_validate({"generator": {"engine": "sglang"}} | settings)


def _chunk(ids: list[int], total: int, spans: list[tuple[str, int, int]], told: list[int] | None = None) -> dict[str, Any]:
    pairs = [[-0.5, i, None] for i in (ids if told is None else told)]
    versions = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {
        "output_ids": ids,
        "meta_info": {"id": "r", "completion_tokens": total, "output_token_logprobs": pairs, "weight_versions": versions},
    }


def test_what_the_server_tells_twice_counts_once_and_what_contradicts_itself_is_an_error() -> None:
    wire = Wire("s", "http://x")
    piece = wire._piece(_chunk([7, 8, 9], 6, [("1", 0, 4), ("2", 4, 6)]), told=3)
    assert (piece.tokens.tolist(), piece.versions.tolist()) == ([7, 8, 9], [1, 2, 2])
    assert wire._piece(_chunk([9], 6, [("2", 0, 6)]), told=6).tokens.tolist() == []  # an abort repeats the last token
    assert wire._piece(_chunk([8, 9], 6, [("2", 0, 6)]), told=5).tokens.tolist() == [9]
    for chunk, told, says in (
        (_chunk([9], 6, [("2", 0, 6)]), 3, "left out tokens"),
        (_chunk([9], 1, [("2", 0, 1)], told=[8]), 0, "other tokens"),
        (_chunk([9], 1, []), 0, "which weights"),
        (_chunk([9], 1, [("default", 0, 1)]), 0, "'default'"),
    ):
        with pytest.raises(RemoteError, match=says):
            wire._piece(chunk, told)
