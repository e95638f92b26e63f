"""Evaluations: shares, scoring, problems from files, results and how they are kept, many runs at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import checkpoint, engine, settle

from asyncllm_nb.evals import sequential, sharded
from asyncllm_nb.evals.cases import OPTIONAL, REQUIRED, Case, arithmetic_cases, as_cases, load_jsonl
from asyncllm_nb.evals.commands import Progress
from asyncllm_nb.evals.protocol import Routing, Setup
from asyncllm_nb.evals.results import Result, Run, differing
from asyncllm_nb.evals.scoring import OUTCOMES, SCORINGS, last_boxed, normal_math
from asyncllm_nb.evals.statistics import Share, wilson
from asyncllm_nb.evals.tables import Table

SHORT = Setup(max_thinking=11, max_summary=3, max_answer=3)
INTEGER, BOXED = SCORINGS["integer"], SCORINGS["boxed"]


# ---- shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(hits: int, of: int, low: float, high: float) -> None:
    """R. G. Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I."""
    assert wilson(hits, of) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(of - hits, of)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(("hits", "of"), [(1, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_what_is_no_share(hits: int, of: int) -> None:
    with pytest.raises(ValueError, match="0 <= hits <= of"):
        wilson(hits, of)


def test_share_of_nothing_is_no_number() -> None:
    assert math.isnan(Share(0, 0).value) and str(Share(0, 0)) == "–"
    assert str(Share(3, 3)) == "100.0 % (43.9–100.0)"


# ---- scoring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("The green box holds 44 coins.", "after"),
        ("Not 44: it holds 38 coins.", "before"),
        ("It holds 19 coins.", "neither"),
        ("So far: nothing.", "unfinished"),
        ("", "unfinished"),
    ],
)
def test_integer_scoring_reads_the_last_number(answer: str, outcome: str) -> None:
    assert INTEGER.outcome(answer, "38", "44") == outcome
    assert INTEGER.outcome(answer, None, "44") == ("neither" if outcome == "before" else outcome)


WORKED = (
    "The green box: twice the blue box; the blue box holds 22, 22 * 2 = 44, so the green box holds 44 coins."
)


@pytest.mark.parametrize(
    ("thinking", "taken_up"),
    [
        (f"The red box holds 15 coins.\n\n{WORKED}\n</think>", True),
        ("The green box holds 44 coins.\n\nCheck: the red box 15, the blue box 7 more.\n</think>", True),
        ("The green box holds 44 coins.\n\nThe red box holds 1", True),
        (f"{WORKED}\n\nThe white box: 5 fewer than the green box; the green box holds 38, 38", True),
        (f"The red box holds 44 coins.\n\n{WORKED[:-1]}", True),
        (f"The red box holds 15 coins.\n\n{WORKED[:-1]}", False),
        ("The green box holds 44 coins.\n\nWait, the red box holds 12 coins.", False),
        ("Ann has 44 apples.\n\nBen: half Tom; Tom has 76, 76 / 2 = 38, so Ben has 38 apples.", False),
        ("Check: the red box 44.", False),
        ("The green box holds 44", False),
        ("", False),
    ],
)
def test_integer_scoring_takes_the_thinkings_own_last_line(thinking: str, taken_up: bool) -> None:
    assert INTEGER.takes_up(thinking, "44") is taken_up


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"$ 1{,}000 $", r"1{,}000"),
        ("1,000", "1000"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("x = 5", "5"),
        (r"50\%", "50"),
        (r"1{,}000", "1,000"),
        (r"12\text{ cm}^2", "12"),
        (r"\frac{1}{2}\ \text{hours}", r"\frac12"),
        (r"$0.5\mbox{ m}$", ".5"),
        (r"2\sqrt3", r"2\sqrt{3}"),
        (r"\text{(B)}", "(B)"),
        (r"90^\circ", "90"),
        ("7.0", "7"),
        ("7.", "7"),
    ],
)
def test_normal_math_drops_what_makes_no_difference(left: str, right: str) -> None:
    assert normal_math(left) == normal_math(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("12", "1.2"),
        ("1,2", "12"),
        ("1.50", "150"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        (r"\text{odd}", r"\text{even}"),
    ],
)
def test_normal_math_keeps_what_does(left: str, right: str) -> None:
    assert normal_math(left) != normal_math(right)


def test_boxed_scoring_reads_the_last_whole_box() -> None:
    assert last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1}, so \boxed{\frac{1}") == "1"
    assert last_boxed("no box") is None
    assert BOXED.outcome(r"It is \boxed{ \dfrac{3}{4} }.", "1", r"\frac34") == "after"
    assert BOXED.outcome("It is 3/4.", "1", r"\frac34") == "unfinished"
    assert BOXED.takes_up(r"so \boxed{7}. Hm. \boxed{8}", "8")


# ---- problems ---------------------------------------------------------------------------------------


def test_arithmetic_cases_are_the_first_of_more_and_change_their_answer() -> None:
    cases = arithmetic_cases(17, seed=3)
    assert cases == arithmetic_cases(40, seed=3)[:17]
    assert cases != arithmetic_cases(17, seed=4)
    assert [case.id for case in cases] == [str(i) for i in range(17)]
    assert all(case.before != case.after and case.correction.startswith("Correction: ") for case in cases)


def test_as_cases_says_what_is_wrong() -> None:
    assert as_cases([("1 + 1?", "No, 1 + 2.", 2, 3)]) == [Case("1 + 1?", "No, 1 + 2.", "2", "3")]
    with pytest.raises(TypeError, match="problem 1 must be a Case or"):
        as_cases([("1 + 1?", "No, 1 + 2.", 2, 3), "1 + 1?"])
    with pytest.raises(ValueError, match="both '2'"):
        as_cases([("1 + 1?", "No, 1 + 1.", 2, "2")])
    with pytest.raises(ValueError, match="no problems"):
        as_cases([])


def jsonl(folder: Path, *lines: object) -> Path:
    file = folder / "problems.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    return file


WHOLE = {"problem": "What is ½ of x?", "correction": "x is 4.", "answer_before": None, "answer_after": 2}


def test_load_jsonl_reads_each_line(tmp_path: Path) -> None:
    short = {"problem": "p", "correction": "c", "answer_after": r"\frac12", "id": "algebra/7", "source": "x"}
    assert load_jsonl(jsonl(tmp_path, WHOLE, "", short)) == [
        Case("What is ½ of x?", "x is 4.", None, "2", "1"),
        Case("p", "c", None, r"\frac12", "algebra/7"),
    ]


def test_load_jsonl_reads_what_other_programs_write(tmp_path: Path) -> None:
    """A mark at the beginning, line ends of Windows, whole numbers as 2.0, and within the text characters
    that only Python's splitlines takes for ends of lines."""
    odd = {"problem": "a\u2028b\x85c", "correction": "d", "answer_after": 2.0, "answer_before": 0.5}
    file = tmp_path / "odd.jsonl"
    file.write_bytes(f"\ufeff{json.dumps(odd, ensure_ascii=False)}\r\n\r\n".encode())
    assert load_jsonl(file) == [Case("a\u2028b\x85c", "d", "0.5", "2", "1")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "must be an object with problem, correction, answer_after"),
        ({"problem": "p", "answer_after": "1"}, "field 'correction' is missing .it has answer"),
        (WHOLE | {"problem": " "}, "field 'problem' must be text"),
        (WHOLE | {"correction": 3}, "field 'correction' must be text"),
        (WHOLE | {"answer_after": [2]}, "field 'answer_after' must be text or a number"),
        (WHOLE | {"answer_before": True}, "field 'answer_before' must be text or a number"),
        (WHOLE | {"answer_before": "2"}, "field 'answer_before' equals 'answer_after'"),
    ],
)
def test_load_jsonl_names_line_and_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"problems.jsonl, line 3: {message}"):
        load_jsonl(jsonl(tmp_path, WHOLE, "", line))


def test_load_jsonl_refuses_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no problems: one JSON object a line"):
        load_jsonl(jsonl(tmp_path))


# ---- results ----------------------------------------------------------------------------------------


def made_up() -> Result:
    """Three problems, two ks, two routings and the control, with outcomes that count up."""
    conditions: list[tuple[Routing, int | None]] = [
        ("before", 0),
        ("writer", 0),
        ("before", 16),
        ("writer", 16),
        ("never", None),
    ]
    runs = []
    for case in range(3):
        for routing, k in conditions:
            outcome = "before" if k is None else OUTCOMES[min(case + k // 16, 3)]
            taken_up, arrived = case == 0, k is not None
            runs.append(
                Run(str(case), routing, k, outcome, taken_up, arrived, True, 70, 90, 12, 80, "“½”")
            )
    return Result({"model": "none", "ks": [0, 16, None]}, runs)


def test_result_counts_outcomes() -> None:
    result = made_up()
    assert result.share("before", 0) == Share(1, 3)
    assert result.share("before", 16) == Share(0, 3)
    assert result.share("writer", 16, "neither") == Share(1, 3)
    assert result.share("writer", None, "before") == Share(3, 3), "never is the same for each routing"
    assert result.taken_up("before", 16) == Share(1, 3)
    text = str(result.table())
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [
        ["before", "0", "3"],
        ["before", "16", "3"],
        ["writer", "0", "3"],
        ["writer", "16", "3"],
        ["–", "never", "3"],
    ]
    assert "33.3 % (6.1–79.2)" in text
    assert "90.0" in str(result.work_table())


def test_result_round_trips(tmp_path: Path) -> None:
    result = made_up()
    file = result.to_json(tmp_path / "new" / "result.json")
    assert Result.from_json(file) == result
    assert file.read_text(encoding="utf-8").count('"before", 16') == 3, "a line for each run"
    assert not list(file.parent.glob(".*")), "nothing unfinished is left"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "asyncllm_nb.trace", "version": 1}'])
def test_result_refuses_other_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json cannot be read"):
        Result.from_json(tmp_path / "result.json")


def test_result_draws_a_curve_for_each_routing() -> None:
    figure = made_up().plot()
    names = [trace.name for trace in figure.data]
    assert names == ["before the thinking", "to the writer only", "nowhere: the answer before"]
    curve = figure.data[0]
    assert list(curve.x) == ["0", "16", "never"]
    assert list(curve.y) == pytest.approx([1 / 3, 0, 0])
    low, high = wilson(1, 3)
    assert curve.error_y.array[0] == pytest.approx(high - 1 / 3)
    assert curve.error_y.arrayminus[0] == pytest.approx(1 / 3 - low)
    assert figure.layout.xaxis.type == "category"
    assert curve.marker.size > figure.data[1].marker.size, "a curve below another one shows"
    assert curve.line.width > figure.data[1].line.width


def test_table_escapes_html() -> None:
    table = Table.of(["<b>"], [["a & b"]])
    assert "&lt;b&gt;" in table._repr_html_() and "a &amp; b" in table._repr_html_()
    assert table.markdown() == "| <b> |\n| --- |\n| a & b |"


def test_differing_names_the_problems() -> None:
    one, other = made_up(), made_up()
    assert differing(one, other) == {condition: [] for condition in one.conditions()}
    at = next(i for i, run in enumerate(other.runs) if run.key == ("1", "writer", 16))
    other.runs[at] = replace(other.runs[at], outcome="after")
    assert differing(one, other)["writer", 16] == ["1"]
    del other.runs[at]
    with pytest.raises(ValueError, match="different problems at writer, k=16"):
        differing(one, other)


# ---- many runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ks": [-1]}, "ks are numbers of tokens"),
        ({"ks": [True]}, "ks are numbers of tokens"),
        ({"ks": []}, "one or more different ks"),
        ({"ks": [4, 4]}, "one or more different ks"),
        ({"routings": ["never"]}, "a routing is one of before, after, writer"),
        ({"routings": []}, "one or more routings"),
        ({"scoring": "exact"}, "scoring must be one of integer, boxed"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"problems": []}, "there are no problems"),
        ({"problems": [Case("p", "c", "1", "2", "x")] * 2}, "two problems have the id 'x': give each one"),
        ({"problems": [("p", "c", "1", r"\frac12")]}, "problem 0: the answer .* is no whole number"),
        ({"problems": [("p", "c", "1,000", "1000")], "scoring": "boxed"}, "the same to the scoring 'boxed'"),
    ],
)
async def test_run_checks_before_anything_runs(arguments: dict[str, object], message: str) -> None:
    async with engine() as llm:
        with pytest.raises(ValueError, match=message):
            await sharded.run(llm, **({"problems": arithmetic_cases(1)} | arguments))  # type: ignore[arg-type]
        assert llm.trace.num_steps == 0 and not llm.blocks


async def test_run_gives_the_same_alone_and_beside_others() -> None:
    cases = arithmetic_cases(3)
    async with engine(seconds=120, max_batch_tokens=4096, cache_tokens=16_000, max_blocks=200) as llm:
        alone = await sharded.run(llm, cases, [0, 5, None], setup=SHORT, concurrency=1)
        beside = await sharded.run(llm, cases, [0, 5, None], setup=SHORT, concurrency=16)
        assert beside == alone
        assert len(alone.runs) == 3 * (2 * 3 + 1)
        assert len({run.key for run in alone.runs}) == len(alone.runs)
        await settle(llm)
        assert not llm.blocks


async def test_run_goes_on_where_a_result_ends() -> None:
    cases = arithmetic_cases(3)
    async with engine(seconds=120, max_batch_tokens=4096, cache_tokens=16_000, max_blocks=200) as llm:
        whole = await sharded.run(llm, cases, [2, None], ["after"], setup=SHORT)
        part = Result(json.loads(json.dumps(whole.settings)), whole.runs[1:4])
        counts: list[tuple[int, int]] = []
        rest = await sharded.run(
            llm,
            cases,
            [2, None],
            ["after"],
            setup=SHORT,
            done=part,
            progress=lambda result, total: counts.append((len(result.runs), total)),
        )
        assert rest == whole
        assert counts == [(4, 6), (5, 6), (6, 6)]
        with pytest.raises(ValueError, match=r"other settings \(ks: \[2, None\], now \[3, None\]\)"):
            await sharded.run(llm, cases, [3, None], ["after"], setup=SHORT, done=part)


async def test_run_says_when_blocks_are_too_few() -> None:
    async with engine(max_blocks=64) as llm:
        with pytest.raises(ValueError, match=r"12 problems .* 72 slots .* 64: .* of 10, .*max_blocks=72"):
            await sharded.run(llm, arithmetic_cases(12), [None], setup=SHORT)
        assert llm.trace.num_steps == 0
    async with engine(max_blocks=5) as llm:
        with pytest.raises(ValueError, match="1 problems .* has 5: make the engine with max_blocks=6"):
            await sharded.run(llm, arithmetic_cases(1), [None], setup=SHORT)


async def test_run_that_fails_raises_what_failed() -> None:
    async with engine(cache_tokens=64, max_blocks=64) as llm:
        with pytest.raises(ExceptionGroup) as failed:
            await sharded.run(llm, arithmetic_cases(1), [None], setup=SHORT)
        assert "CacheFullError" in repr(failed.value)


async def test_comparison_has_the_three_ways(tmp_path: Path) -> None:
    async with engine(seconds=120, max_batch_tokens=4096, cache_tokens=16_000, max_blocks=200) as llm:
        often = Setup(max_thinking=30, max_summary=3, max_answer=3, paragraph="e")
        compared = await sequential.run(llm, arithmetic_cases(4), setup=often)
        shared, after, plain = compared.ways.values()
        assert list(compared.ways) == ["shared", "sequential", "answer only"]
        for one, two, three in zip(shared.runs, after.runs, plain.runs, strict=True):
            assert one.tokens == two.tokens == three.tokens == 30
            assert one.passes <= two.passes and three.passes <= two.passes
        again = sequential.Comparison.from_json(compared.to_json(tmp_path / "compared.json"))
        assert again == compared
        assert str(compared.table()).count("\n") == 3
        after.runs[:] = shared.runs
        assert compared.same_words("shared", "sequential") == 4
        after.runs[1] = replace(after.runs[1], answer="other words")
        assert compared.same_words("shared", "sequential") == 3
        with pytest.raises(ValueError, match="no comparison"):
            sequential.Comparison.from_json(shared.to_json(tmp_path / "one.json"))


# ---- the command lines ------------------------------------------------------------------------------


def test_sharded_command_writes_a_result_and_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "result.json", tmp_path / "curve.html"
    short = ["--model", str(checkpoint()), "--max-thinking", "7", "--max-answer", "3", "--ks", "0,5,never"]
    command = [*short, "--problems", "2", "--routing", "before", "--routing", "writer", "--out", str(file)]
    sharded.main([*command, "--plot", str(page)])
    result = Result.from_json(file)
    assert len(result.runs) == 2 * (2 * 2 + 1)
    assert result.settings["ks"] == [0, 5, None] and result.settings["setup"]["max_thinking"] == 7
    assert str(result.table()) in capsys.readouterr().out
    assert "plotly" in page.read_text(encoding="utf-8")
    del result.runs[3]
    result.to_json(file)
    sharded.main(command)
    captured = capsys.readouterr()
    assert "10 of 10 runs" in captured.err and "9 of 10" not in captured.err, "one run was made"
    with pytest.raises(SystemExit):
        sharded.main([*command, "--seed", "5"])
    assert "start a new file" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        sharded.main([*command, "--max-answer", "4"])
    assert "other settings (max_answer: 3, now 4)" in capsys.readouterr().err.splitlines()[-1]


def test_sharded_command_reads_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = jsonl(tmp_path, WHOLE, WHOLE | {"id": "two"})
    short = ["--model", str(checkpoint()), "--max-thinking", "7", "--max-answer", "3", "--ks", "4"]
    sharded.main([*short, "--dataset", str(dataset), "--routing", "after", "--out", str(tmp_path / "r.json")])
    result = Result.from_json(tmp_path / "r.json")
    assert [run.case for run in result.runs] == ["1", "two"]
    assert result.settings["scoring"] == "boxed"
    told = capsys.readouterr().out
    assert "after" in told
    assert "No answer was found by --scoring boxed" in told, "a random model boxes nothing"


def test_sharded_command_refuses_a_folder_for_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sharded.main(["--plot", str(tmp_path), "--model", "nonsense"])
    assert "is a folder: give the name of an HTML file" in capsys.readouterr().err.splitlines()[-1]


def test_sharded_command_explains_a_wrong_k(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharded.main(["--ks", "4,often"])
    assert "give numbers and 'never', as in 0,16,never" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "0"], "'0': give a whole number, at least 1"),
        (["--concurrency", "-1"], "'-1': give a whole number, at least 1"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "nonsense"], "there is no model 'nonsense'"),
        (["--problems", "1", "--ks", "4,4"], "one or more different ks"),
    ],
)
@pytest.mark.parametrize("command", [sharded.main, sequential.main])
def test_commands_explain_mistakes_in_a_line(
    command: Callable[[list[str]], None],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        command([*arguments, "--model", str(checkpoint())] if "--model" not in arguments else arguments)
    assert ended.value.code == 2
    if command is sequential.main and "--ks" in arguments:
        message = "unrecognized arguments: --ks"
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_command_help_names_the_fields_of_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharded.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n{name}: " in said for name in (*REQUIRED, *OPTIONAL))


def test_progress_tells_the_rest_from_its_own_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier evaluation has made took none of this one's time."""
    few = Progress(25, 4, seconds=0)
    few.one_more()
    assert capsys.readouterr().err == "5 of 25 runs\n", "one of 21 tells nothing of the rest"
    saved: list[int] = []
    progress = Progress(25, 10, save=lambda: saved.append(progress.done), seconds=50)
    progress.began -= 60
    progress.last -= 10
    progress.one_more()
    assert not saved and not capsys.readouterr().err
    progress.last -= 50
    for _ in range(4):
        progress.one_more()
    progress.last -= 50
    progress.seconds = 0
    for _ in range(10):
        progress.one_more()
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("12 of 25 runs, ") and last == "25 of 25 runs, 0 s left"
    assert saved[0] == 12 and saved[-1] == 25
    left = float(first.removeprefix("12 of 25 runs, ").removesuffix(" s left"))
    assert 13 * 30 <= left < 13 * 60, "13 more at two a minute"


def test_sequential_command_writes_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sequential.json"
    short = ["--model", str(checkpoint()), "--max-thinking", "7", "--max-answer", "3", "--problems", "2"]
    sequential.main([*short, "--out", str(file)])
    compared = sequential.Comparison.from_json(file)
    assert str(compared.table()) in capsys.readouterr().out
    assert [len(result.runs) for result in compared.ways.values()] == [2, 2, 2]
