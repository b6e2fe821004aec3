"""The library: the same for a seed, names unique, every question answered by the documents on its path and by no other way."""

from collections import Counter

import pytest

from troupe.envs import fiction

LIBRARY = fiction.write(0)
QUESTIONS = list(fiction.questions(LIBRARY))


def test_a_seed_gives_the_same_library_and_another_seed_another():
    assert fiction.write(0) == LIBRARY
    assert len({entity.text for entity in fiction.write(1)} & {entity.text for entity in LIBRARY}) < len(LIBRARY) / 20


def test_the_names_of_a_library_are_unique_and_there_are_a_few_hundred():
    for seed in range(5):
        names = [entity.name for entity in fiction.write(seed)]
        assert len(set(names)) == len(names) == 340


def test_a_document_states_every_fact_of_its_entity():
    for entity in LIBRARY:
        assert entity.name in entity.text
        assert all(fact in entity.text for fact in entity.facts.values())


def test_there_is_no_question_twice_and_there_are_enough_of_each_kind():
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS)
    assert Counter(question.hops for question in QUESTIONS) == {1: 3 * 340, 2: 3 * (120 + 2 * 40 + 2 * 140)}


def test_the_path_leads_from_the_name_in_the_question_to_the_answer():
    for question in QUESTIONS:
        first, last = question.path[0], question.path[-1]
        assert first.name in question.text and question.answer in last.facts.values()
        assert last is first or (last.name in first.facts.values() and last.name not in question.text)


@pytest.mark.parametrize(
    ("kind", "facts", "hops", "text"),
    [
        ("book", {"author": "Ida Corek"}, 2, "In which town was the author of {} born?"),
        ("publisher", {"town": "Velmora"}, 2, "What is the home town of {} known for?"),
        ("person", {"job": "painter"}, 1, "What is the profession of {}?"),
    ],
)
def test_questions_read_as_a_person_would_ask_them(kind, facts, hops, text):
    asked = {q.text: q for q in QUESTIONS if q.path[0].kind == kind}
    name = next(entity.name for entity in LIBRARY if entity.kind == kind)
    assert asked[text.format(name)].hops == hops and facts.keys() <= asked[text.format(name)].path[0].facts.keys()
