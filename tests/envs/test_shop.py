"""Shop: what is wanted can be found and bought, buying pays as WebShop's paper says, wishes are held out by their words."""

import random
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from troupe.envs import catalogue
from troupe.envs.base import Task, belongs, rng_of
from troupe.envs.catalogue import Goal, Product
from troupe.envs.check import player_score
from troupe.envs.shop import Shop, pay, type_factor
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import InvalidAction, TaskFailed

SHIRT = Product(
    title="Arvo cotton shirt for office and summer, slim fit",
    kind="shirt",
    category=("clothing", "tops"),
    nouns=frozenset({"Arvo", "cotton", "shirt", "office", "summer"}),
    attributes=("cotton", "slim fit", "quick dry"),
    options={"colour": ("red", "blue"), "size": ("S", "L")},
    price=35,
)
LAMP = Product(
    title="Vesta wood lamp for reading and desks, hand made",
    kind="lamp",
    category=("home", "lighting"),
    nouns=frozenset({"Vesta", "wood", "lamp", "reading", "desks"}),
    attributes=("wood", "hand made", "easy clean"),
    options={"colour": ("red", "blue")},
    price=35,
)
SWEATER = Product(
    title="Dunova cotton sweater for winter and skiing, slim fit",
    kind="sweater",
    category=("clothing", "knitwear"),
    nouns=frozenset({"Dunova", "cotton", "sweater", "winter", "skiing"}),
    attributes=("cotton", "slim fit", "long lasting"),
    options={"colour": ("red", "blue"), "size": ("S", "L")},
    price=50,
)
WISH = Goal(like=SHIRT, attributes=("cotton", "slim fit"), options={"colour": "red", "size": "L"}, price=40)


def opened(split="train", seed=0, wish: Goal | None = None, **options) -> Shop:
    world, task = Shop(**options), Task("x", "shop", split, seed)
    world.rng = rng_of(task)
    world.reset(task)
    world.goal = wish or world.goal
    return world


def on_page(product: Product, wish: Goal = WISH) -> Shop:
    world = opened(wish=wish)
    world.found, world.product = [product], product
    return world


# -- the reward: r = r_type * (attributes + options + price that match) / (2 + 2 + 1), worked out by hand -----------------


@pytest.mark.parametrize(
    ("product", "clicks", "parts", "total"),
    [
        (SHIRT, ["red", "L"], {"attributes": 0.4, "options": 0.4, "price": 0.2}, 1.0),
        (SHIRT, ["blue", "L"], {"attributes": 0.4, "options": 0.2, "price": 0.2}, 0.8),
        (SHIRT, ["blue", "red", "S", "L"], {"attributes": 0.4, "options": 0.4, "price": 0.2}, 1.0),  # the last click counts
        (SHIRT, [], {"attributes": 0.4, "options": 0.0, "price": 0.2}, 0.6),
        # another kind and category; of five nouns it shares "cotton": m = 0.2, so half of (2 + 2 + 0) / 5
        (SWEATER, ["red", "L"], {"attributes": 0.2, "options": 0.2, "price": 0.0}, 0.4),
        (SWEATER, ["blue"], {"attributes": 0.2, "options": 0.0, "price": 0.0}, 0.2),
        (LAMP, ["red"], {"attributes": 0.0, "options": 0.0, "price": 0.0}, 0.0),  # no noun in common: nothing counts
    ],
)
def test_buying_pays_what_matches_times_the_type(product, clicks, parts, total):
    world = on_page(product)
    for value in clicks:
        assert world.step(f"click[{value}]").reward == 0.0
    turn = world.step("click[buy]")
    assert turn.done and turn.reward == pytest.approx(total) and turn.parts == pytest.approx(parts)
    assert turn.success is (total == 1.0)


def test_the_price_is_enough_when_it_is_equal_and_not_a_dollar_below():
    exact, below = (Goal(SHIRT, ("quick dry",), {"colour": "red", "size": "L"}, price) for price in (35, 34))
    assert pay(exact, SHIRT, {"colour": "red"}) == {"attributes": 0.25, "options": 0.25, "price": 0.25}
    assert pay(below, SHIRT, {"colour": "red"}) == {"attributes": 0.25, "options": 0.25, "price": 0.0}


def test_an_option_under_another_name_is_no_match():
    assert pay(WISH, SHIRT, {"size": "red", "colour": "L"})["options"] == 0.0


@pytest.mark.parametrize(
    ("match", "alike", "factor"),
    [
        (0.0, True, 0.0),
        (0.05, True, 0.1),
        (0.05, False, 0.1),
        (0.1, False, 0.5),
        (0.2, False, 0.5),
        (0.1, True, 1.0),
        (0.21, False, 1.0),
        (1.0, False, 1.0),
    ],
)
def test_the_type_factor_is_webshops(match, alike, factor):
    assert type_factor(match, alike) == factor


def test_two_shared_categories_are_as_good_as_the_kind():
    tops = Product("", "blouse", SHIRT.category, frozenset({"cotton"}), SHIRT.attributes, {}, 35)
    assert sum(pay(WISH, tops, WISH.options).values()) == pytest.approx(1.0)


def test_products_of_two_kinds_share_one_noun_at_most_so_only_the_wanted_kind_is_worth_1():
    products = catalogue.stock(0, 900)
    for one in products:
        others = [other for other in products if other.kind != one.kind]
        assert max(len(one.nouns & other.nouns) for other in others) <= 1
        assert one.category not in {other.category for other in others}


# -- the shop ------------------------------------------------------------------------------------------------------------


def test_a_catalogue_is_its_seed_and_its_size():
    assert catalogue.stock(3, 50) == catalogue.stock(3, 80)[:50] != catalogue.stock(4, 50)
    for product in catalogue.stock(3, 200):
        values = [value.lower() for options in product.options.values() for value in options]
        assert len(values) == len(set(values)) and not {"buy", "back", "next page"} & set(values)
        assert len(product.nouns) == 5 and all(noun in product.title for noun in product.nouns)


def test_a_search_cannot_tell_a_family_apart_and_each_of_it_is_another_thing_to_buy():
    products = catalogue.stock(0, 200)
    for start in range(0, 200, 4):
        family = products[start : start + 4]
        assert len({(one.name, one.text) for one in family}) == 1
        assert sum(not one.lacks for one in family) == 2  # the others are decoys for who wants what they lack
        assert all({*one.attributes} | {*one.lacks} == {*family[0].attributes} | {*family[0].lacks} for one in family)
        assert not any({*one.attributes} & {*one.lacks} for one in family)
        assert len({(one.lacks, *one.options.values(), one.price) for one in family}) == 4


def test_what_a_product_lacks_is_seen_and_is_not_paid():
    wish = Goal(like=SHIRT, attributes=("cotton", "quick dry"), options={"colour": "red"}, price=40)
    decoy = replace(SHIRT, attributes=("cotton", "slim fit"), lacks=("quick dry",))
    world = on_page(decoy, wish)
    assert "\nattributes cotton, slim fit, not quick dry\n" in world._observation()
    world.product = None
    assert f"\n1 {decoy.title}, not quick dry, red blue, S L, 35 dollars\n" in world._observation()
    assert pay(wish, decoy, {"colour": "red"}) == {"attributes": 0.25, "options": 0.25, "price": 0.25}


def blindly(wanted: str) -> list[str]:
    """Actions of somebody who knows the wish and reads nothing else: the first that is found, with the options, is bought."""
    values = re.findall(r"(?:colour|size) (\w+)", wanted)
    return [f"search[{wanted}]", "click[1]", *(f"click[{value}]" for value in values), "click[buy]"]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_who_buys_the_first_that_is_found_without_reading_it_is_seldom_right(split):
    bought = []
    for seed in range(200):
        world = opened(split, seed)
        for action in blindly(world.goal.instruction):
            with suppress(InvalidAction):
                turn = world.step(action)
        bought.append(turn)
    assert all(turn.done for turn in bought)
    assert sum(turn.success for turn in bought) / len(bought) < 0.35
    assert 0.5 < sum(turn.reward for turn in bought) / len(bought) < 0.8  # what matches in part is paid in part


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_what_is_wanted_is_found_by_its_title_and_pays_1(split):
    for seed in range(40):
        world = opened(split, seed, results=10)
        world.step(f"search[{world.goal.like.title}]")
        while world.goal.like not in world._shown():
            world.step("click[next page]")
        world.step(f"click[{world._shown().index(world.goal.like) + 1}]")
        for value in world.goal.options.values():
            world.step(f"click[{value}]")
        turn = world.step("click[buy]")
        assert (turn.reward, turn.success) == (pytest.approx(1.0), True)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 3))
def test_no_training_wish_is_held_out_whatever_the_seeds(train_seed, heldout_seed, catalogue):
    trained, held_out = opened("train", train_seed).goal, opened("heldout", heldout_seed, catalogue=catalogue).goal
    assert belongs(trained.wanted, "train") and belongs(held_out.wanted, "heldout") and trained.wanted != held_out.wanted
    assert trained.wanted in trained.instruction


def test_an_unknown_split_is_a_task_that_fails():
    with pytest.raises(TaskFailed, match="unknown split 'test'"):
        opened("test")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_an_episode_is_its_task_and_its_actions(seed, player):
    def episode():
        world, rng, seen = opened(seed=seed), random.Random(player), []
        for _ in range(world.max_turns):
            action = world.play(rng, 0.5)
            turn = world.step(action)
            seen.append((action, turn.text, turn.reward, turn.parts, world.state_key()))
            if turn.done:
                break
        return seen

    assert episode() == episode()


def test_one_finds_the_way_through_the_pages_and_back():
    world = opened(results=2)
    assert world.clickable() == [] and world._observation().endswith("dollars.\nsearch[words]")
    first = world.step("I try search[Shirt] then click[back]").text
    assert "results page 1" in first and first.endswith("click[number] or click[next page] or click[back]")
    shown = [one.title for one in world._shown()]
    assert world.clickable() == ["1", "2", "next page", "back"]
    assert all(f"\n{number} {title}, " in first for number, title in enumerate(shown, 1))
    second = world.step("click[Next  Page]").text
    assert "results page 2" in second and second.count("dollars") == 3
    opens = world._shown()[1]
    page = world.step("CLICK[ 2 ]").text
    assert (
        world.product is opens and f"\n{opens.title}\n" in page and page.endswith("click[value] or click[buy] or click[back]")
    )
    colour = world.product.options["colour"][0]
    assert f"({colour})" in world.step(f"click[{colour}]").text
    assert world.step("click[back]").text == second
    assert f"({colour})" not in world.step("click[2]").text  # options are not kept
    world.step("click[back]")
    assert world.step("click[back]").text == first
    assert world.step("click[back]").text.endswith("search[words]")


def test_the_last_page_has_no_next_one():
    world = opened(results=1)
    world.step("search[shirt]")
    for page in range(2, 6):
        assert f"results page {page}" in world.step("click[next page]").text
    with pytest.raises(InvalidAction, match=r"not here to be clicked: click\[number\] or click\[back\]$"):
        world.step("click[next page]")


def test_nothing_found_is_said():
    text = opened().step("search[zebra]").text
    assert text.endswith("nothing was found\nclick[back]")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("buy it", "no action: click"),
        ("click[6]", "not here to be clicked"),
        ("click[buy]", "not here to be clicked"),
        ("click[]", "not here to be clicked"),
        ("search[shirt]", "search only on the search page: click"),
        ("x" * 5_000 + "click[back]", "no action"),
    ],
)
def test_what_cannot_be_done_is_told_and_changes_nothing(action, told):
    world = opened()
    world.step("search[mug]")
    before = world.state_key()
    with pytest.raises(InvalidAction, match=told):
        world.step(action)
    assert world.state_key() == before


def test_a_search_without_words_is_told():
    world = opened()
    with pytest.raises(InvalidAction, match="no words"):
        world.step("search[?!]")
    assert world.found is None


def test_the_player_buys_what_is_wanted_and_noise_costs_it():
    sure, unsure = (player_score(Shop, {}, n=150, noise=noise) for noise in (0.0, 0.5))
    assert sure.success > 0.98 and sure.turns < 7
    assert unsure.success < sure.success - 0.3 and 0 < unsure.reward < sure.reward


def test_the_player_leaves_what_is_worth_nothing():
    assert on_page(LAMP).play(random.Random(0), 0.0) == "click[back]"


def test_a_tokenizer_made_from_the_corpus_reads_an_action_word_by_word(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path, Shop.corpus()) / "tokenizer.json"))
    assert len(tokenizer.encode("search[steel hand made lamp]").ids) == 7
    for product in catalogue.stock(0, 200):
        words = product.title.replace(",", " ,").split()
        assert len(tokenizer.encode(f" {product.title}").ids) == len(words)


@pytest.mark.parametrize("options", [{"products": 19}, {"products": 901}, {"results": 0}, {"results": 11}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Shop(**options)
