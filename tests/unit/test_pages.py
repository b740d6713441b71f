"""What a log folder comes to: runs, numbers, sentences; and markup that cannot be broken out of."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.events import json_line
from malleus_megatron.pages.bands import bands, width_of_spans
from malleus_megatron.pages.history import Bounds, History
from malleus_megatron.pages.log_folder import plans_of, read_log
from malleus_megatron.pages.markup import Markup, tag
from malleus_megatron.pages.page import Frame, make_page
from malleus_megatron.pages.rate_table import MOST_ALONE, MOST_ROWS, MOST_SPANS, rate_table
from malleus_megatron.pages.scales import (
    factor_scale,
    iteration_ticks,
    rate_class,
    round_scale,
    short,
    tick_texts,
)
from malleus_megatron.pages.story import Story, story_to_json, tell
from malleus_megatron.plan.rates import Rates
from tests.harness.logs import (
    CHANGES,
    LAST,
    MOVED,
    NOMINAL,
    RATE,
    RECOVERS,
    RETURNS,
    SLOW_GPU,
    SLOWS,
    job_events,
    keep_plan,
    write_log,
)

finite = st.floats(-1e12, 1e12).filter(lambda value: value == 0 or abs(value) > 1e-9)


class Reader(HTMLParser):
    """All elements and all text, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(text=st.text(alphabet=st.characters(exclude_characters="\r\x00", exclude_categories=["Cs"])))
def test_text_stays_text(text: str) -> None:
    read = Reader(tag("p", text, tag("b", "x"), title=text))
    assert [name for name, _ in read.found] == ["p", "b"]
    assert read.found[0][1]["title"] == text
    assert read.text == text + "x"


def test_markup_goes_in_as_it_is_and_what_is_none_is_left_out() -> None:
    made = tag("p", Markup("<br>"), None, class_="a", text_anchor=None, hidden=True, open=False)
    assert made == '<p class="a" hidden><br></p>'
    assert tag("line", x1=1.0, x2=2.345678) == '<line x1="1" x2="2.35"></line>'


@given(one=finite, other=finite)
def test_a_scale_holds_both_ends_with_few_numbers_that_tell_them_apart(
    one: float, other: float
) -> None:
    low, high = min(one, other), max(one, other)
    scale = round_scale(low, high)
    slack = 1e-9 * (scale[-1] - scale[0])
    assert scale[0] <= low + slack
    assert scale[-1] >= high - slack
    assert 2 <= len(scale) <= 13
    if high - low > 1e-4 * max(abs(low), abs(high)):
        assert len(set(tick_texts(scale))) == len(scale)


@given(one=st.floats(1e-6, 1e6), factor=st.floats(1, 1e6))
def test_a_scale_of_factors_holds_both_ends(one: float, factor: float) -> None:
    scale = factor_scale(one, one * factor)
    assert scale[0] <= one <= one * factor < scale[-1]


@given(first=st.integers(1, 10**7), count=st.integers(1, 10**6))
def test_ticks_are_few_and_inside(first: int, count: int) -> None:
    ticks = iteration_ticks(first, first + count - 1)
    assert ticks[0] == first
    assert ticks == sorted(set(ticks))
    assert ticks[-1] < first + count
    assert len(ticks) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.91344, "0.9134"), (12.0, "12.00"), (45123.4, "45123"), (0.0, "0"), (None, "-"),
     (math.nan, "-"), (math.inf, "inf"), (3e-7, "3.000e-07"), (9.9999e8, "999990000")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("rate", "style"),
    [(None, "unknown"), (math.nan, "unknown"), (0.9, "r0"), (1.0949, "r0"), (1.0999, "r1"),
     (2.9999999, "r5"), (1.1, "r1"), (1.99, "r3"), (2.0, "r4"), (4.99, "r5"), (1000.0, "r6"),
     (math.inf, "failed")],
)  # fmt: skip
def test_rates_have_a_colour_each(rate: float | None, style: str) -> None:
    assert rate_class(rate) == style


@given(
    values=st.dictionaries(st.integers(1, 5000), st.floats(), min_size=1),
    most=st.integers(1, 400),
)
def test_bands_hide_no_extreme_and_invent_none(values: dict[int, float], most: int) -> None:
    first, last = min(values), max(values)
    width = width_of_spans(first, last, most)
    found = bands(values.items(), first, width)
    shown = [value for value in values.values() if math.isfinite(value)]
    assert len(found) <= most
    assert sum(band.num_values for band in found) == len(shown)
    for band in found:
        inside = [v for i, v in values.items() if band.first <= i <= band.last and math.isfinite(v)]
        assert (band.lowest, band.highest) == (min(inside), max(inside))
        assert band.middle == median(inside)
        assert band.last - band.first < width


def story_of(folder: Path) -> Story:
    run = read_log(folder).runs[-1]
    return tell(run, plans_of(folder, run))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("log")
    write_log(made, job_events())
    return made


def test_the_sentence_says_who_when_and_what_it_cost(folder: Path) -> None:
    assert story_of(folder).headline == (
        f"GPU {SLOW_GPU} slowed down to rate 2.57 at iteration {SLOWS}; "
        f"recovered by iteration {RECOVERS + 2}; "
        f"the plan changed at iterations {CHANGES} and {RETURNS}; "
        "a step took 1.006 s before, 2.013 s until the plan changed, 1.318 s under the new plan "
        "and 1.035 s under the last one."
    )


def test_a_later_straggler_is_not_the_new_plans_fault(tmp_path: Path) -> None:
    times = {1: 1.0, 5: 3.0, 10: 1.5, 15: 4.0, 20: 2.0}
    events: list[dict[str, Any]] = [
        {
            "event": "iteration",
            "iteration": k,
            "step_time_s": times[max(at for at in times if at <= k)],
        }
        for k in range(1, 26)
    ]
    events += [
        {"event": "straggler", "iteration": 8, "gpu": 0, "rate": 3.0, "since": 5},
        {"event": "plan", "iteration": 10, "generation": 1},
        {"event": "straggler", "iteration": 18, "gpu": 2, "rate": 4.0, "since": 15},
        {"event": "plan", "iteration": 20, "generation": 2},
    ]
    write_log(tmp_path, sorted(events, key=lambda event: event["iteration"]))
    assert (
        "1.000 s before, 3.000 s until the plan changed, 1.500 s under the new plan "
        "and 2.000 s under the last one."
    ) in story_of(tmp_path).headline


def test_generations_are_cut_where_the_plan_changes(folder: Path) -> None:
    told = {
        phase.generation: (phase.first, phase.last, phase.predicted_s, phase.layout)
        for phase in story_of(folder).phases
    }
    assert told == {
        0: (1, CHANGES - 1, None, "8 x (0:4 | 2:4), ..."),
        1: (CHANGES, RETURNS - 1, 1.25, "layout of 1"),
        2: (RETURNS, LAST, None, "8 x (0:4 | 2:4), ..."),
    }


def test_a_straggler_has_its_span_its_peak_and_its_reason(folder: Path) -> None:
    story = story_of(folder)
    [one] = story.stragglers
    assert (one.gpu, one.since, one.named, one.recovered) == (
        SLOW_GPU, SLOWS, SLOWS + 2, RECOVERS + 2,
    )  # fmt: skip
    assert (one.rate, one.peak_rate, one.reason) == (RATE, RATE, "thermal slowdown, 93 C")
    assert story.active == ()


def test_the_plan_in_force_is_the_last_and_earlier_ones_have_their_rates(folder: Path) -> None:
    story = story_of(folder)
    assert [place.generation for place in story.places] == [0, 1, 2]
    assert story.now is not None
    assert story.now.plan == NOMINAL
    assert story.now.rates[SLOW_GPU] == 1.01
    assert story.places[1].plan == MOVED
    assert story.places[1].rates[SLOW_GPU] == RATE


def test_a_plan_of_another_run_is_not_shown(tmp_path: Path) -> None:
    write_log(tmp_path, job_events())
    keep_plan(tmp_path, 2, MOVED)
    (tmp_path / "plans" / "generation-1.json").write_text("{")
    story = story_of(tmp_path)
    assert [place.generation for place in story.places] == [0]
    assert story.now is None


def test_rates_hold_until_the_next_ones(folder: Path) -> None:
    table = rate_table(read_log(folder).runs[0])
    assert table is not None
    row = table.rows[SLOW_GPU]
    by_iteration = dict(zip(table.starts, row.rates, strict=True))
    assert [by_iteration[i] for i in (1, 3, SLOWS + 1, SLOWS + 2, RECOVERS + 1, RECOVERS + 2)] == [
        None, 1.01, 1.01, RATE, RATE, 1.01,
    ]  # fmt: skip
    assert (table.end, table.groups) == (LAST + 1, ())


def history(*events: dict[str, Any], bounds: Bounds | None = None) -> History:
    made = History(bounds)
    for event in events:
        made.add(event)
    return made


def steps(count: int, **values: Any) -> list[dict[str, Any]]:
    return [{"event": "iteration", "iteration": k} | values for k in range(1, count + 1)]


def test_a_thousand_gpus_and_many_iterations_stay_readable() -> None:
    run = history(*steps(5000, step_time_s=1.0))
    for iteration in range(1, 5000, 100):
        rates = dict.fromkeys(range(1024), 1.0) | {700: 1.0 + iteration / 1000}
        run.add_rates(iteration, Rates.of(rates))
    table = rate_table(run)
    assert table is not None
    assert len(table.starts) <= MOST_SPANS
    assert [row.gpus for row in table.rows] == [(700,)]
    assert len(table.rows) + len(table.groups) <= MOST_ROWS
    assert sorted(gpu for row in table.groups for gpu in row.gpus) == list(range(1024))
    [group] = [row for row in table.groups if 700 in row.gpus]
    assert group.rates == table.rows[0].rates
    assert max(rate or 0 for rate in group.rates) == pytest.approx(1 + 4901 / 1000)


def test_of_many_slow_gpus_the_slowest_are_alone() -> None:
    run = history(*steps(3, step_time_s=1.0))
    run.add_rates(1, Rates.of({gpu: 1.0 + gpu for gpu in range(200)}))
    table = rate_table(run)
    assert table is not None
    assert [row.gpus for row in table.rows] == [(gpu,) for gpu in range(200 - MOST_ALONE, 200)]


def test_a_span_shows_its_highest_rate() -> None:
    run = history(*steps(MOST_SPANS * 10, step_time_s=1.0))
    for iteration, rate in ((1, 1.0), (24, 5.0), (25, 1.0)):
        run.add_rates(iteration, Rates.of({0: rate}))
    table = rate_table(run)
    assert table is not None
    assert [rate for rate in table.rows[0].rates if rate != 1.0] == [5.0]


def test_a_bounded_history_keeps_the_latest() -> None:
    run = History(Bounds(steps=10, events=3, rates=8))
    for k in range(1, 101):
        run.add({"event": "iteration", "iteration": k, "step_time_s": 1.0})
        run.add({"event": "warning", "iteration": k, "message": str(k)})
        run.add_rates(k, Rates.of({0: 1.0, 3: 2.0}))
    assert [step.iteration for step in run.steps] == list(range(91, 101))
    assert [event.iteration for event in run.events] == [98, 99, 100]
    assert [rates.iteration for rates in run.rates] == [99, 100]
    assert (run.num_iterations, run.last_iteration) == (100, 100)


def test_stragglers_that_stay_and_no_plan() -> None:
    run = history(
        *steps(4, step_time_s=1.0),
        {"event": "straggler", "iteration": 4, "gpu": 7, "rate": "inf"},
        {"event": "straggler", "iteration": 4, "gpu": 2, "rate": 1.5, "since": 3},
    )
    story = tell(run, {})
    assert story.headline == (
        "GPUs 2 and 7 slowed down from iteration 3 on, GPU 7 the most (rate inf); the plan did not "
        "change; a step took 1.000 s before and 1.000 s since then."
    )
    assert [one.gpu for one in story.active] == [2, 7]
    assert (story.now, story.rates) == (None, None)


def test_a_straggler_that_recovers_by_itself() -> None:
    run = history(*steps(20, step_time_s=1.0)[:3])
    for k in range(4, 21):
        run.add({"event": "iteration", "iteration": k, "step_time_s": 3.0 if k < 7 else 1.0})
    run.add({"event": "straggler", "iteration": 5, "gpu": 0, "rate": 3.0, "since": 4})
    run.add({"event": "recovered", "iteration": 7, "gpu": 0, "rate": 1.0})
    assert tell(run, {}).headline == (
        "GPU 0 slowed down to rate 3.00 at iteration 4; recovered by iteration 7; the plan did not "
        "change; a step took 1.000 s before, 3.000 s until then and 1.000 s after that."
    )


def test_a_healthy_job_and_one_that_has_not_begun() -> None:
    healthy = tell(history(*steps(3, step_time_s=0.5)), {})
    assert healthy.headline == (
        "No straggler was found in 3 iterations; a step took 0.5000 s (median)."
    )
    begun = tell(history({"event": "level", "iteration": 0, "level": "observe"}), {})
    assert begun.headline == "No iteration has ended yet."


def test_losses_that_are_no_numbers_are_counted_and_not_drawn() -> None:
    run = history(*steps(1, loss=2.0), {"event": "iteration", "iteration": 2, "loss": "nan"})
    story = tell(run, {})
    assert (story.num_bad_losses, len(story.losses)) == (1, 1)
    assert story.step_times == ()


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_lines_that_are_no_events_are_told_and_left_out(tmp_path: Path) -> None:
    good = json.dumps({"event": "iteration", "iteration": 1, "step_time_s": 2.0})
    odd = json.dumps({"event": "comet", "iteration": 1, "tail": [1, 2]})
    lines = [good, "", "[1]", "{", '{"event": "iteration"}', odd,
             '{"event": "rates", "iteration": 1, "rates": {"x": 1}}',
             '{"event": "rates", "iteration": 1, "rates": {"999999999": 1}}',
             '{"event": "iteration", "iteration": -1}']  # fmt: skip
    log = read_log(write(tmp_path, "\n".join([*lines, '{"event": "it'])))
    assert log.notes == (
        "line 3: the line: expected an object, got [1].",
        "line 4: no JSON",
        "line 5: iteration: the field 'iteration' is missing.",
        "line 7: rates: 'x' is not a GPU number.",
        "line 8: rates: GPU 999999999; at most 1048576 are shown.",
        "2 more lines could not be read",
    )
    [run] = log.runs
    assert run.num_iterations == 1
    assert [event.kind for event in run.events] == ["comet"]


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        ('"step_time_s": -2.5', "iteration: step_time_s -2.5 is no time."),
        ('"step_time_s": "inf"', "iteration: step_time_s inf is no time."),
        ('"step_time_s": NaN', "iteration: step_time_s nan is no time."),
        (f'"tail": "{"x" * 2**20}"', "1048627 bytes; at most 1048576 are read"),
    ],
    ids=["negative", "infinite", "no number", "long"],
)
def test_times_and_lines_beyond_sense_are_left_out(tmp_path: Path, wrong: str, note: str) -> None:
    bad = f'{{"event": "iteration", "iteration": 2, {wrong}}}'
    good = [f'{{"event": "iteration", "iteration": {i}, "step_time_s": 1.5}}' for i in (1, 3)]
    log = read_log(write(tmp_path, "\n".join([good[0], bad, good[1]]) + "\n"))
    assert log.notes == (f"line 2: {note}",)
    assert [step.iteration for step in log.runs[0].steps] == [1, 3]


def test_a_last_line_that_was_cut_off_is_told(tmp_path: Path) -> None:
    write_log(tmp_path, job_events())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "iteration", "iter')
    assert [note.partition(": ")[2] for note in read_log(tmp_path).notes] == ["cut off"]


@pytest.mark.parametrize("begins_with_level", [True, False])
def test_two_runs_in_a_file_are_two(tmp_path: Path, begins_with_level: bool) -> None:
    write_log(tmp_path, job_events())
    again = list(job_events(first=21 if begins_with_level else 1))
    write_log(tmp_path, again if begins_with_level else again[1:])
    first, second = read_log(tmp_path).runs
    assert (first.num_iterations, second.num_iterations) == (
        LAST,
        20 if begins_with_level else LAST,
    )
    assert second.steps[0].iteration == (21 if begins_with_level else 1)


@pytest.mark.parametrize("text", ["", "\n\n", "not json\n"])
def test_a_file_without_events_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match="holds no event .*--malleus-log-dir"):
        read_log(write(tmp_path, text))


@pytest.mark.parametrize(
    "event",
    [
        {"event": "straggler", "iteration": 2, "gpu": -2, "rate": 2.0},
        {"event": "iteration", "iteration": 3, "loss": 5e-324, "step_time_s": 1e308},
        {"event": "iteration", "iteration": 10**12, "generation": -1, "loss": -1e30},
        {"event": "injection", "iteration": 0, "gpu": 0, "rate": 1e308, "from_iteration": 10**40},
        {"event": "memory", "iteration": 1, "measured_mib": [None, "nan", -5], "usable_mib": 0},
    ],
)
def test_numbers_that_nobody_measures_break_no_page(event: dict[str, Any]) -> None:
    run = history(*steps(2, step_time_s=1.0, loss=1.0))
    run.add_rates(1, Rates.of({0: math.inf}))
    run.add(event)
    page = make_page(tell(run, {0: NOMINAL}), Frame(title="t", source="s"))
    drawn = [a["d"] or "" for name, a in Reader(page).found if name == "path"]
    assert drawn
    assert not [path for path in drawn if re.search("nan|inf", path)]


def test_a_history_does_not_go_back() -> None:
    run = history(*steps(2))
    for iteration in (2, 1, -1, 10**13):
        with pytest.raises(BadInputError):
            run.add({"event": "iteration", "iteration": iteration})
    assert run.num_iterations == 2


@given(
    body=st.dictionaries(
        st.sampled_from(
            "event iteration gpu rate since rates predicted plan generation message bytes seconds "
            "measured_mib usable_mib layout reason level gpus step_time_s loss".split()
        ),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text()
        | st.lists(st.none() | st.floats() | st.text(max_size=3), max_size=3)
        | st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    ),
    kind=st.sampled_from(
        "level iteration rates memory straggler recovered plan migration replica warning injection "
        "pace odd".split()
    ),
)  # fmt: skip
def test_whatever_an_event_holds_there_is_a_page(body: dict[str, Any], kind: str) -> None:
    run = history(*steps(2, step_time_s=1.0, loss=1.0))
    try:
        run.add({"iteration": 3} | body | {"event": kind})
    except BadInputError:
        return
    story = tell(run, {})
    json.loads(json_line(story_to_json(story)))
    assert make_page(story, Frame(title="t", source="s")).startswith("<!doctype html>")
