"""Desk: what policy allows is paid and what it forbids is not, customers answer what they are asked, a model may play them."""

import asyncio
import json
import random
from functools import cache

import pytest

from troupe.envs.base import Task, ToolCall, belongs
from troupe.envs.check import player_score
from troupe.envs.desk import records as desk
from troupe.envs.desk.customer import Scripted
from troupe.envs.desk.player import _WHY
from troupe.envs.desk.refusing import refused
from troupe.envs.desk.requests import KINDS, Request, _Draw, ways_to_say
from troupe.envs.desk.telling import told
from troupe.envs.desk.world import Desk
from troupe.envs.drive import Driver
from troupe.protocol.errors import EnvironmentFailed, InvalidAction, TaskFailed


async def opened(split="train", seed=0, **options):
    driver = Driver(Desk(**options))
    return driver, await driver.reset(Task("x", "desk", split, seed))


@cache
def seed_of(kind, allowed):
    """A training task with one wish, of this kind."""
    for seed in range(600):
        world = asyncio.run(opened(seed=seed, requests=1))[0].world
        if (world.wishes[0].kind, world.wishes[0].allowed) == (kind, allowed):
            return seed
    raise AssertionError(f"no {kind} in 600 tasks")


async def of_kind(kind, allowed, **options):
    """An episode with one wish, of this kind."""
    seed = await asyncio.to_thread(seed_of, kind, allowed)
    driver, opening = await opened(seed=seed, requests=1, **options)
    return driver, driver.world.wishes[0], opening


async def act(driver, action):
    return await (driver.step(action) if isinstance(action, str) else driver.call(*action))


async def played(driver, noise=0.0, rng=None):
    """The player's episode to its end: what was done, and the last turn."""
    actions = []
    for _ in range(driver.world.max_turns):
        actions.append(driver.play(rng or random.Random(0), noise))
        turn = await act(driver, actions[-1])
        if turn.done:
            return actions, turn
    raise AssertionError("the player does not come to an end")


async def read_all(driver):
    """Finds the customer, and looks up whatever there is."""
    records = driver.world.records
    await driver.call("find_customer", {"email": records["customers"][driver.world.customer]["email"]})
    for number in (*records["orders"], *records["reservations"]):
        await driver.call("look_up", {"number": number})
    for item in records["stock"]:
        await driver.call("stock", {"item": item})


async def said_to_the_end(driver, message):
    """What it is worth to say the same again and again."""
    for _ in range(12):
        turn = await driver.step(message)
        if turn.done:
            return turn.reward
    return (await driver.verify()).reward


# -- what is paid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["refund", "exchange", "cancel", "address"])
async def test_what_is_asked_for_is_done_where_it_is_allowed_and_refused_where_it_is_not(kind):
    for allowed in (True, False):
        driver, _, _ = await of_kind(kind, allowed)
        before = json.dumps(driver.world.records)
        _, turn = await played(driver)
        assert (turn.reward, turn.success, turn.parts) == (1.0, True, {"outcome": 1.0})
        assert (json.dumps(driver.world.records) != before) is allowed


async def test_doing_what_is_forbidden_and_not_doing_what_is_allowed_are_told_at_the_end():
    driver, wish, _ = await of_kind("cancel", False)
    await driver.call("cancel", {"number": wish.number})
    turn = await driver.step("It is cancelled.")
    kind = "orders" if wish.number.startswith("O") else "reservations"
    assert (turn.reward, turn.success) == (0.0, False)
    assert f"({kind}.{wish.number}.status: expected '" in turn.text and "found 'cancelled')" in turn.text
    driver, wish, _ = await of_kind("cancel", True)
    turn = await driver.step("It is cancelled.")
    assert turn.reward == 0.0 and f"{wish.number}.status: expected 'cancelled'" in turn.text


async def test_a_change_too_many_is_not_paid():
    driver, wish, _ = await of_kind("cancel", True)
    other = next(n for n in driver.world.records["orders"] if n != wish.number)
    await driver.call("cancel", {"number": wish.number})
    await driver.call("change_address", {"order": other, "address": "1 Mill Lane"})
    assert (await driver.step("It is cancelled.")).reward == 0.0


async def test_what_the_customer_asks_to_know_has_to_be_told_as_it_is():
    for said, reward in (("{}", 1.0), ("It is 9{}.", 0.0), ("", 0.0), ("Let me think. {}-1", 0.0)):
        driver, wish, _ = await of_kind("lookup", True)
        told = wish.tell[0][0]
        await driver.call("look_up", {"number": wish.number})
        turn = await driver.step(f"So: {said.format(told)}")
        assert turn.done and turn.reward == reward and (f"not told: {told}" in turn.text) is (reward == 0.0)


async def test_who_recites_every_answer_has_told_none():
    days = [desk.day(n) for n in range(1, 100)]
    numbers = [str(n) for n in range(401)]
    in_words = [way for day in days for way in ways_to_say(day)]
    shots = (["pending", "shipped", "delivered"], numbers, days, in_words)
    asked = 0
    for seed in range(60):
        for shot in shots:
            driver, _ = await opened(seed=seed, requests=1)
            if driver.world.wishes[0].tell:
                asked += 1
                await read_all(driver)
                turn = await driver.step(", ".join(shot))
                assert turn.reward == 0.0, (driver.world.wishes, shot)
    assert asked > 20


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("shipped", "Your order O123 of the red cap is shipped since 2 May 2026.", True),
        ("shipped", "It is pending, shipped or delivered.", False),
        (120, "You paid 120 for O123, in size M, delivered on 2026-05-02; 30 days are left.", True),
        (120, " ".join(map(str, range(300))), False),
        ("2026-06-03", "You arrive on 3 June 2026 and stay for 2 nights, until 5 June.", True),
        ("2026-06-03", "It is 1 June, 2 June, 3 June, 4 June or 5 June.", False),
        ("2026-06-03", "June 1, June 2, June 3rd, June 4.", False),
    ],
)
def test_an_answer_may_have_company_but_no_rivals(answer, said, right):
    assert told(ways_to_say(answer), said, "It is O123.") is right


RECITAL = (
    "I am sorry, I cannot do that: it is shipped, it was delivered more than 30 days ago, you bought it on sale, it is not in "
    "stock, and it is somebody else's."
)


@pytest.mark.parametrize("forbidden", [0.3, 1.0])
@pytest.mark.parametrize("message", ["", "I cannot do that.", "I am sorry, that is against our policy.", "Goodbye", RECITAL])
async def test_who_says_the_same_to_everybody_serves_and_refuses_nobody(message, forbidden):
    for seed in range(30):
        for split in ("train", "heldout"):
            driver, _ = await opened(split, seed, forbidden=forbidden)
            if forbidden == 1.0:
                await read_all(driver)
            assert await said_to_the_end(driver, message) == 0.0, driver.world.wishes


@pytest.mark.parametrize("kind", ["refund", "exchange", "cancel", "address", "friend"])
async def test_a_refusal_says_no_says_why_and_is_looked_up(kind):
    no = "I am sorry, I cannot do that"
    driver, wish, _ = await of_kind(kind, False)
    wrong = "sale" if wish.why != "sale" else "others"
    why = driver.world.player._no(wish)
    assert why.startswith(no)
    shots = [(why, True, 1.0), (why, False, 0.0), (f"{no}.", True, 0.0), (why.removeprefix(no), True, 0.0)]
    shots.append((f"{no}: {_WHY[wrong]}.", True, 0.0))
    for said, looked_up, reward in shots:
        driver, _, _ = await of_kind(kind, False)
        if looked_up:
            await read_all(driver)
        assert await said_to_the_end(driver, said) == reward, (said, looked_up)


async def test_what_is_told_was_looked_up():
    driver, wish, _ = await of_kind("lookup", True)
    turn = await driver.step(f"It is {wish.tell[0][0]}.")
    assert turn.done and turn.reward == 0.0 and f"(not looked up: {wish.number})" in turn.text


@pytest.mark.parametrize(
    ("reason", "said", "right"),
    [
        ("status", "Unfortunately your cap has already been shipped, so it can't be cancelled.", True),
        ("status", "I’m sorry, only pending orders can be cancelled.", True),
        ("status", "I can't refund it, because it hasn't been delivered yet.", True),
        ("status", "It is shipped.", False),
        ("status", "I cannot cancel it.", False),
        ("time", "It was delivered on 3 April, 47 days ago. I cannot refund that.", True),
        ("time", "I'm unable to: a delivered order can be refunded up to 30 days after delivery, unless bought on sale.", True),
        ("time", "Your stay begins on 2026-05-22, so I am not able to cancel it.", True),
        ("time", "Sorry, it was bought on sale.", False),
        ("sale", "We don't refund what was discounted, sorry.", True),
        ("stock", "Sorry, size L is sold out.", True),
        ("stock", "Unfortunately there are none left in size L.", True),
        ("others", "I can only help you with your own orders, so I can't do that.", True),
        ("others", "I am sorry, that order belongs to another customer.", True),
        ("others", "I am sorry, I will look.", False),
        *((reason, RECITAL, False) for reason in ("status", "time", "sale", "stock", "others")),
    ],
)
def test_a_reason_may_have_company_but_no_rivals(reason, said, right):
    assert refused(reason, said, [reason]) is right


async def test_what_is_somebody_elses_must_not_be_told():
    driver, wish, _ = await of_kind("friend", False)
    (secret,) = wish.secret
    turn = await driver.step(f"It goes to {secret}.")
    assert turn.done and turn.reward == 0.0 and "not theirs" in turn.text
    driver, _, _ = await of_kind("friend", False)
    assert (await played(driver))[1].reward == 1.0


async def test_a_transfer_ends_the_conversation_and_is_right_for_damage_only():
    for kind, reward in (("damage", 1.0), ("lookup", 0.0), ("cancel", 0.0)):
        driver, _, _ = await of_kind(kind, True)
        turn = await driver.call("transfer", {"reason": "I do not know"})
        assert (turn.done, turn.reward) == (True, reward)
    driver, _, _ = await of_kind("refund", False)
    assert (await driver.call("transfer", {"reason": "lazy"})).reward == 0.0


async def test_a_conversation_that_a_limit_ends_is_not_paid_though_all_is_done():
    driver, wish, _ = await of_kind("cancel", True)
    await driver.call("cancel", {"number": wish.number})
    assert (await driver.verify()).reward == 0.0


# -- the records ---------------------------------------------------------------------------------------------------------


async def test_the_tools_tell_what_cannot_be_done():
    driver, wish, _ = await of_kind("refund", True)
    for name, arguments, reply in (
        ("find_customer", {"email": "nobody@post.no"}, "no customer"),
        ("look_up", {"number": "O1"}, "there is no order or reservation 'O1'"),
        ("stock", {"item": wish.thing[:-1]}, f"Did you mean '{wish.thing}'"),
        ("exchange", {"order": wish.number, "size": "XXL"}, "not in stock in size XXL"),
        ("refund", {"order": "R1"}, "there is no order 'R1'"),
    ):
        with pytest.raises(InvalidAction, match=reply):
            await driver.call(name, arguments)
    await driver.call("refund", {"order": wish.number})
    for name in ("refund", "cancel"):
        with pytest.raises(InvalidAction, match="is refunded already"):
            await driver.call(name, {"order" if name == "refund" else "number": wish.number})


def test_an_exchange_takes_one_from_the_stock():
    maker = desk.Maker(random.Random(0))
    number = maker.order(maker.customer(), "red cap", "delivered", 3, size="S")
    before = dict(maker.records["stock"]["red cap"])
    desk.exchange(maker.records, number, "L")
    assert maker.records["stock"]["red cap"] == before | {"L": before["L"] - 1}
    assert maker.records["orders"][number]["size"] == "L"


def by_policy(records, customer, wish):
    """Whether the policy, as it is written, allows a wish: worked out here once more, from the records."""
    found = desk.record(records, wish.number)
    since = (desk.TODAY - desk.date.fromisoformat(found["delivered"])).days if found.get("delivered") else 1_000
    until = (desk.date.fromisoformat(found["arrival"]) - desk.TODAY).days if "arrival" in found else -1
    return (
        found["customer"] == customer
        and {
            "refund": lambda: since <= 30 and not found["on_sale"],
            "exchange": lambda: since <= 60 and records["stock"][wish.thing][wish.change[1]["size"]] > 0,
            "address": lambda: found["status"] == "pending",
            "cancel": lambda: found.get("status") == "pending" or until >= 7,
            "lookup": lambda: True,
            "damage": lambda: True,
            "friend": lambda: False,
        }[wish.kind]()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_wish_is_allowed_if_the_policy_says_so_to_the_day(kind):
    make, may = KINDS[kind]
    thing = "Fox Hut" if kind == "cancel a stay" else "red cap"
    for seed in range(400):
        for allowed in {"either": (True, False), "allowed": (True,), "forbidden": (False,)}[may]:
            maker = desk.Maker(random.Random(seed))
            customer = maker.customer()
            wish = make(_Draw(maker, customer, thing, allowed))
            assert wish.allowed is allowed is by_policy(maker.records, customer, wish), wish


def test_a_date_may_be_said_in_words():
    assert {"2026-06-03", "3 June", "June 3", "3rd of June"} <= set(ways_to_say("2026-06-03"))
    assert "11th June" in ways_to_say("2026-06-11") and ways_to_say(120) == ("120",)


async def test_no_wish_is_in_both_splits_and_a_share_of_them_is_forbidden():
    wishes = {"train": set(), "heldout": set()}
    for split, seen in wishes.items():
        for seed in range(150):
            driver, _ = await opened(split, seed)
            seen |= {("cancel a stay" if w.wish.startswith("I cannot come") else w.kind, w.thing) for w in driver.world.wishes}
        assert {kind for kind, _ in seen} == set(KINDS) and all(belongs(" ".join(wish), split) for wish in seen)
    assert not wishes["train"] & wishes["heldout"]
    for forbidden in (0.0, 1.0):
        for seed in range(20):
            driver, _ = await opened(seed=seed, forbidden=forbidden)
            assert {wish.allowed for wish in driver.world.wishes} == {not forbidden}
    with pytest.raises(TaskFailed, match="unknown split"):
        await opened("test")


# -- the customer who follows a script -----------------------------------------------------------------------------------


FACTS = {"number": "It is O123.", "size": "I need size L.", "reason": "It does not fit."}
WISH = Request("exchange", "red cap", "O123", "I need the red cap in another size.", True, FACTS)
NEXT = Request("lookup", "blue cap", "O124", "What is the status of my order of the blue cap?", True, {"number": "It is O124."})


def customer(*wishes, insists=False):
    made = Scripted("ada.berg@post.no", wishes or (WISH,), random.Random(0))
    made.insists = [insists] * len(made.wishes)
    return made


@pytest.mark.parametrize(
    ("message", "reply", "over"),
    [
        ("What is your e-mail address?", "It is ada.berg@post.no.", False),
        ("Please give me your email and the order number.", "It is ada.berg@post.no. It is O123.", False),
        ("Could I have your order ID?", "It is O123.", False),
        ("Of course! Which size would you like?", "I need size L.", False),
        ("Why do you want to return it?", "It does not fit.", False),
        ("I’m sorry to hear that. What size do you need?", "I need size L.", False),
        ("Shall I go ahead?", "Yes, please.", False),
        ("I will exchange it. Do you confirm (yes/no)?", "Yes, please.", False),
        ("Hello, how are you today?", "It is ada.berg@post.no.", False),
        ("One moment, I am checking that.", "All right, I wait.", False),
        ("", "All right, I wait.", False),
        ("Your cap is exchanged for size L.", "Thank you. Goodbye.", True),
        ("I sent you an e-mail about order number O123.", "Thank you. Goodbye.", True),
        ("It is done. Can I help you with anything else?", "Thank you. Goodbye.", True),
        ("Unfortunately this can't be done.", "Then I leave it as it is. Goodbye.", True),
        ("I can’t do that. Is there anything else?", "Then I leave it as it is. Goodbye.", True),
    ],
)
def test_a_customer_answers_what_is_asked(message, reply, over):
    assert customer().answer(message) == (reply, over)


def test_a_customer_goes_on_to_the_next_wish_and_asks_for_an_exception_once():
    one = customer(WISH, NEXT, insists=True)
    assert one.answer("No, sorry.") == ("That is a pity. Can you not make an exception, just this once?", False)
    assert one.answer("No, sorry.") == (f"Then I leave it as it is. One more thing. {NEXT.wish}", False)
    assert one.answer("What is the number of the order?").text == "It is O124."
    assert one.answer("It is shipped.") == ("Thank you. Goodbye.", True)


def test_a_customer_says_one_thing_after_the_other_and_loses_patience():
    one = customer()
    said = [one.answer("How are you?").text for _ in range(5)]
    assert said[:4] == ["It is ada.berg@post.no.", *FACTS.values()] and said[4] == WISH.wish
    replies = [one.answer(text) for text in ("What is your e-mail?", "Wait.", "", "How are you?")]
    assert [reply.over for reply in replies] == [False, False, False, True]
    assert replies[-1].text == "This leads nowhere. Goodbye."


# -- the customer whom a model plays -------------------------------------------------------------------------------------


async def test_a_model_plays_the_customer_and_says_when_it_is_over(endpoint):
    with endpoint("<think>hm</think>Hi, the cap!", "My mail is a@b.no", "Bye. ###STOP###") as (url, asked):
        driver, wish, opening = await of_kind("cancel", True, user_url=url, user_model="m")
        assert opening == "Hi, the cap!"
        assert (await driver.step("Who are you?")).text == "My mail is a@b.no"
        await driver.call("cancel", {"number": wish.number})
        turn = await driver.step("It is cancelled.")
    assert (turn.done, turn.success, turn.text) == (True, True, "Bye.")
    body = asked[-1][1]
    told, *conversation = body["messages"]
    email = driver.world.records["customers"][driver.world.customer]["email"]
    assert body["model"] == "m" and body["temperature"] == 0
    assert all(text in told["content"] for text in (email, wish.wish, *wish.facts.values(), "###STOP###"))
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in conversation[2:]] == ["Who are you?", "My mail is a@b.no", "It is cancelled."]


async def test_the_player_serves_a_customer_whom_a_model_plays(endpoint):
    with endpoint("I have a wish.", "I do not know.") as (url, _):
        driver, wish, _ = await of_kind("cancel", True, user_url=url, user_model="m")
        for _ in range(12):
            await act(driver, driver.play(random.Random(0), 0.0))
    assert desk.record(driver.world.records, wish.number)["status"] == "cancelled"


async def test_a_model_that_fails_to_play_the_customer_breaks_the_episode(endpoint):
    async def broken(*replies, match, **options):
        with endpoint(*replies) as (url, _):
            with pytest.raises(EnvironmentFailed, match=match):
                driver, _ = await opened(user_url=url, user_model="m", **options)
                await driver.step("Hello.")
            return url

    await broken("Hello.", 400, match=r"the customer, m at http://127\.0\.0\.1.*BadRequestError.*not now")
    await broken("Hello.", "", match="the model m that plays the customer has said nothing")
    gone = await broken(None, match=r"the model m that plays the customer has not answered for 0\.3 s", user_timeout_s=0.3)
    with pytest.raises(EnvironmentFailed, match=r"the customer, m at .*APIConnectionError"):
        await opened(user_url=gone, user_model="m")


# -- the player ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_player_serves_everybody_and_noise_costs_it(split):
    sure, unsure = (player_score(Desk, {"requests": 3}, n=40, noise=noise, split=split) for noise in (0.0, 0.3))
    assert sure.success == 1.0 and sure.turns < 14 and unsure.success < 0.8


async def test_the_player_says_and_does_nothing_that_it_was_not_told():
    for seed in range(40):
        driver, opening = await opened(seed=seed, requests=2)
        heard = opening
        for _ in range(driver.world.max_turns):
            action = driver.play(random.Random(0), 0.0)
            if isinstance(action, ToolCall):
                values = [str(value) for name, value in action.arguments.items() if name in ("email", "size", "address")]
                assert all(value in heard for value in values), (action, heard)
                heard += str((turn := await driver.call(*action)).text)
            else:
                heard += (turn := await driver.step(action)).text
            if turn.done:
                break


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 0},
        {"requests": 4},
        {"forbidden": 1.1},
        {"user_url": "http://x"},
        {"user_model": "m"},
        {"user_timeout_s": 0},
    ],
)
def test_options_that_make_no_sense_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Desk(**options)


def test_worlds_do_not_share_records():
    one, other = (asyncio.run(opened(seed=3))[0].world for _ in range(2))
    assert one.records == other.records and one.records is not other.records
    one.records["transferred"] = True
    assert not other.records["transferred"]
