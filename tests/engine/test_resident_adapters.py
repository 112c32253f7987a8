"""More adapters than slots: which sequences are admitted, and what is loaded where."""

from msgspec import structs

from tests.engine.fake_runner import FakeRunner, make_sequence
from tests.engine.schedulers import add, drain, make_scheduler, step


def rows(adapters, max_tokens=3, first=0):
    """A sequence for each of these adapters, with prompts of their own."""
    found = []
    for number, adapter in enumerate(adapters, first):
        sequence = make_sequence([number % 20, 1, 2], max_tokens, number)
        sequence.spec = structs.replace(sequence.spec, adapter=adapter)
        found.append(sequence)
    return found


def begun(plans):
    """The sequences that each plan starts, where it starts any, and what it loads."""
    return [([spec.id for spec in plan.started], [*plan.adapter_loads]) for plan in plans if plan.started]


def test_rows_of_an_adapter_that_is_there_pass_others():
    """Rows by turns of two adapters ran one at a time."""
    scheduler = make_scheduler(*rows([1, 2, 1, 0, 2, 1]), adapter_slots=1)
    _, plans = drain(scheduler, FakeRunner())
    assert begun(plans) == [([0, 2, 3, 5], [(1, 1)]), ([1, 4], [(2, 1)])]


def test_all_that_fit_run_together():
    """Slots stayed empty, or were taken from rows that ran."""
    scheduler = make_scheduler(*rows([3, 1, 2, 3, 1]), adapter_slots=2)
    _, plans = drain(scheduler, FakeRunner())
    assert begun(plans) == [([0, 1, 3, 4], [(3, 1), (1, 2)]), ([2], [(2, 1)])]


def test_without_slots_nothing_is_loaded():
    """All adapters are there for ever."""
    scheduler = make_scheduler(*rows([1, 2, 0, 3]))
    _, plans = drain(scheduler, FakeRunner())
    assert begun(plans) == [([0, 1, 2, 3], [])]


def test_what_is_wanted_most_stays():
    """An adapter left that the next rows have, and was loaded again for each of them."""
    scheduler, runner = make_scheduler(*rows([1, 2], max_tokens=1), adapter_slots=2), FakeRunner()
    step(scheduler, runner)
    add(scheduler, *rows([3, 1, 1], first=2))
    plan, _ = step(scheduler, runner)
    assert begun([plan]) == [([2, 3, 4], [(3, 2)])]


def test_a_row_is_passed_by_a_bounded_number():
    """It waited for ever where rows of another adapter kept coming."""
    first = [*rows([1], max_tokens=1), *rows([1, 2], max_tokens=2, first=1)]
    scheduler, runner = make_scheduler(*first, seqs=2, adapter_slots=1), FakeRunner()
    numbers, finished = iter(range(3, 1000)), []
    while 2 not in finished:
        # One ends while another runs.
        while scheduler.num_unfinished < 4:
            add(scheduler, *rows([1], max_tokens=2, first=next(numbers)))
        finished += [sequence.id for sequence in step(scheduler, runner)[1]]
    # Those that came at most 4 times as late as may run.
    assert sorted(finished) == list(range(10))


def test_loads_are_of_the_plan_that_reads_them():
    """After an abort, nothing is known to be there."""
    scheduler, runner = make_scheduler(*rows([1, 1]), adapter_slots=1), FakeRunner()
    plan, _ = step(scheduler, runner)
    assert plan.adapter_loads == ((1, 1),)
    scheduler.abort()
    add(scheduler, *rows([1], first=7))
    plan, _ = step(scheduler, runner)
    assert plan.reset and plan.adapter_loads == ((1, 1),)
    add(scheduler, *rows([1], first=8))
    assert step(scheduler, runner)[0].adapter_loads == ()
