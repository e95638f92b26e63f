"""The training texts: each is right, says the same whenever the same is asked, and stays what it was."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from task_reader import (
    THING,
    VERB,
    WHO,
    Follower,
    given,
    last_statement,
    lowered,
    read_line,
    read_sentence,
    solve,
    text_of,
    turns,
    warns,
)

from asyncllm_nb.tasks import KINDS, Example, calculate, examples, make_example, parse_answer


def texts(kind: str, count: int, seed: str = "texts") -> Iterator[Example]:
    rng = random.Random(f"{seed}/{kind}")
    for _ in range(count):
        yield make_example(rng, kind)


def test_each_worked_problem_ends_with_the_right_answer_and_a_check_that_agrees() -> None:
    found = Counter[str]()
    for pieces in texts("a", 2000):
        text = text_of(pieces)
        users = [content for role, content in turns(text) if role == "user"]
        thinking = turns(text)[-1][1]
        assert pieces[-1].learned and text.endswith("<|im_end|>")

        paragraphs = thinking.removeprefix("<think>\n").split("\n</think>")[0].split("\n\n")
        follower = Follower("\n".join(users))
        for paragraph in paragraphs:
            follower.read(paragraph)
        assert parse_answer(thinking) == follower.true["?"], text
        for told, line in pairwise(paragraphs):
            assert lowered(line) != told.split("Wait, ")[-1], f"said twice: {line}"
        true = {who: value for who, value in follower.true.items() if who != "?" or "together?" in text}
        assert follower.written == true, text
        assert paragraphs[-1].startswith("Check: ") and "not" not in paragraphs[-1].split()
        found["redone"] += "Wait" in thinking
        found["found by a check"] += ", not " in "".join(p for p in paragraphs if p.startswith("Check"))
        found["later"] += len(users) > 1
        found["in the prompt"] += "\n" in users[0]
        found["two chains"] += " together?" in text
    assert all(found[what] > 100 for what in found), found


def used_number(paragraph: str) -> tuple[str, int] | None:
    """Whose given number a line uses, and which: "The blue box: 7 more than the red box; ..." uses 7."""
    line = read_line(paragraph)
    return (line.who, int(line.rest[0])) if line and line.reading < 3 else None


def test_a_check_finds_the_first_number_that_is_not_the_prompts_and_nothing_else() -> None:
    found = Counter[str]()
    for pieces in texts("a", 1000, "checks"):
        text = text_of(pieces)
        known = "\n".join(content for role, content in turns(text) if role == "user")
        thinking = turns(text)[-1][1].removeprefix("<think>\n").split("\n</think>")[0]
        used: dict[str, int] = {}
        for place, paragraph in enumerate(thinking.split("\n\n")):
            told = paragraph
            if paragraph.startswith("Check: "):
                match = re.fullmatch(r"Check: (.+?)(?:, not (\d+))?\.(?: (Wait, .+))?", paragraph)
                assert match, paragraph
                shorts, wrong, told = match.groups()
                said = given(known)
                for who, short in zip(said, shorts.split(", "), strict=not wrong):
                    reading, rest = said[who]
                    assert short.startswith(who + " ")
                    if reading > 2:
                        assert not any(map(str.isdigit, short.removeprefix(who)))
                        continue
                    assert short == f"{who} {rest[0]}" + ("", " more", " fewer")[reading], text
                    last = short == shorts.split(", ")[-1]
                    assert (used[who] != rest[0]) == bool(wrong and last), text
                    assert not (wrong and last) or used[who] == int(wrong)
                found["found" if wrong else "agrees"] += 1
            elif paragraph.startswith("Wait, ") and (place or "\n<think>\nWait" not in text):
                known += "\n" + paragraph
            if told and told.startswith("Wait, "):
                clause = re.sub(r", not \d+\.$|\.$", "", told.removeprefix("Wait, "))
                who, reading, rest = read_sentence(clause)
                if reading == 0:
                    used[who] = int(rest[0])
            number = used_number(paragraph)
            if number:
                used[number[0]] = number[1]
    assert found["found"] > 100 and found["agrees"] > 900, found


def test_a_wrong_line_is_given_and_the_check_that_finds_it_is_learned() -> None:
    for pieces in texts("a", 1000, "given"):
        assert [a.learned != b.learned for a, b in pairwise(pieces)].count(False) == 0
        assert all(piece.text for piece in pieces)
        read = "".join(piece.text for piece in pieces if not piece.learned)
        learned = "".join(piece.text for piece in pieces if piece.learned)
        assert "not " not in re.sub(r"(?:Sorry|Wait), [^\n]+", "", read)
        assert "<|im_start|>" not in learned and "user" not in learned
        for who, wrong in re.findall(rf"{WHO} \d+(?: more| fewer)?, not (\d+)\. Wait", learned):
            assert (who, int(wrong)) in map(used_number, read.split("\n")), text_of(pieces)
        if "Check:" in read:  # then somebody interjects after it
            assert re.search(r"Check: [^\n]+\n\nWait, ", read)


def test_summaries_say_the_last_quantity_or_each_in_turn() -> None:
    for pieces in texts("b", 1000):
        text = text_of(pieces)
        if "Sum up each step." in text:
            said = re.findall(r"In short, ([^\n]+?)\.", text)
            thinking = re.sub(r"\n\nIn short,[^\n]+", "", text)
            lines = thinking.split("<think>\n")[1].split("\n\nCheck:")[0].split("\n\n")
            assert said == [last_statement(line) for line in lines], text
            continue
        before, summary = "", None
        for piece in pieces:
            if before.endswith("In short,"):
                summary = re.match(r" ([^\n]+?)\.", piece.text)
                assert summary and piece.learned
                behind = "<think>" + before.split("<think>", 1)[1]
                behind = re.sub(r"<\|im_end\|>\n<\|im_start\|>user\n[^\n]+", "", behind)  # what users say
                assert summary[1] == (last_statement(behind) or "nothing yet"), text
            before += piece.text
        assert summary


def test_an_answer_on_demand_is_the_answer_or_says_how_far_the_thinking_got() -> None:
    found = Counter[str]()
    for pieces in texts("d", 1000):
        text = text_of(pieces)
        before, answer = text.rsplit("</think>\n\n", 1)
        answer = answer.removesuffix("<|im_end|>")
        behind = re.sub(r"<\|im_start\|>user\n[^\n]+", "", "<think>" + before.split("<think>", 1)[1])
        statement = last_statement(behind)
        if answer.startswith("Wait, "):
            users = [content for role, content in turns(text) if role == "user"]
            assert parse_answer(answer) == solve("\n".join(users))["?"], text
            found["redone"] += 1
        elif answer.startswith("So far: "):
            assert answer == f"So far: {statement or 'nothing'}.", text
            found["so far" if statement else "nothing"] += 1
        else:
            assert statement and answer == statement[0].upper() + statement[1:] + ".", text
            found["answer"] += 1
    assert all(found[what] > 9 for what in ("redone", "so far", "nothing", "answer")), found


def test_the_calculators_results_are_given_and_right() -> None:
    for pieces in texts("e", 300):
        text = text_of(pieces)
        calls = re.findall(r"calc\(([^)]+)\)</tool_call><tool_response>(\d+)</tool_response> (\d+) ", text)
        assert calls and all(calculate(call) == int(found) == int(used) for call, found, used in calls)
        assert parse_answer(text) == int(calls[-1][1])
        for piece in pieces:
            assert piece.learned != ("<tool_response>" in piece.text or "user" in piece.text)
    for wrong in ("2 + ", "2 / 1", "2+1", "2 + 1 + 1"):
        with pytest.raises(ValueError, match="two whole numbers"):
            calculate(wrong)


def test_sub_questions_are_answered_and_used() -> None:
    for pieces in texts("f", 300):
        text = text_of(pieces)
        user = turns(text)[0][1].removesuffix(" Use sub-questions.")
        values = solve(user)
        answers = re.findall(rf"Sub-answer: {WHO} {VERB} (\d+) ", text)
        asked = re.findall(rf"Sub-question: how many {THING} does {WHO} ", text)
        assert sorted(asked) == sorted(who for who, _ in answers) and len(asked) == 2
        assert all(values[who] == int(number) for who, number in answers)
        assert parse_answer(text) == values["?"] == sum(int(number) for _, number in answers)


def test_log_texts_answer_yes_or_no_of_the_line_before() -> None:
    for pieces in texts("c", 1000):
        text = text_of(pieces)
        rule = turns(text)[0][1].split("\n")[0]
        lines = re.findall(r"^(\d\d:\d\d [^:\n]+)\n", turns(text)[0][1], re.M)
        before = ""
        for piece in pieces:
            if before.endswith("Warn?"):
                assert piece.learned and piece.text in (" yes", " no")
                inside = before.split("<|im_end|>")[0]
                last = re.findall(r"^(\d\d:\d\d [^:\n]+)\n", inside, re.M)[-1]
                assert piece.text == (" yes" if warns(rule, last) else " no"), text
            before += piece.text
        now = re.search(r"\nThe ([a-z ]+) is (\d+)\.<", text)
        if now:
            assert [line.split()[-1] for line in lines if now[1] in line][-1] == now[2], text


def test_spoken_texts_say_yes_when_the_question_is_complete() -> None:
    for pieces in texts("g", 1000):
        before = ""
        for piece in pieces:
            if before.endswith("Answer now?"):
                heard = before.rsplit("Heard: ", 1)[1].split("\n")[0]
                assert piece == ((" yes" if heard.endswith("?") else " no"), True)
            before += piece.text


DIGESTS = {
    "a": "8fc9e1d46bb11d44",
    "b": "eae8caf7d9a61ff0",
    "c": "8c66faca8050a804",
    "d": "d47f5969499dc9e9",
    "e": "f01eb68cf01af6b2",
    "f": "96e5e20c3cd614ec",
    "g": "2593db07d1bfc70e",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_texts(kind: str) -> None:
    """Trained models and committed results depend on these texts: a change here is a new model."""
    digest = hashlib.sha256()
    for pieces in texts(kind, 200, "digest"):
        digest.update(repr([(piece.text, piece.learned) for piece in pieces]).encode())
    assert digest.hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_well_formed_and_short(kind: str) -> None:
    for pieces in texts(kind, 1000):
        text = text_of(pieces)
        assert text.startswith("<|im_start|>user\n") and not pieces[0].learned
        assert any(piece.learned for piece in pieces)
        assert len(text) <= examples.LONGEST
        roles = [role for role, _ in turns(text)]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
        assert all(piece.text.isascii() for piece in pieces)


def test_the_mixture_has_the_shares_that_it_names() -> None:
    rng = random.Random("mixture")
    characters = Counter[str]()
    for _ in range(7000):
        kind = examples.mixture_kind(rng)
        characters[kind] += len(text_of(make_example(rng, kind)))
    for kind, share in examples.SHARES.items():
        # Shares are of tokens; texts with many digits have fewer characters a token.
        assert characters[kind] / characters.total() == pytest.approx(share, rel=0.35), characters
    with pytest.raises(ValueError, match="no kind 'h'"):
        make_example(rng, "h")
