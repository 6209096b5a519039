from lightning_ft.rerun.divergence import Divergence, Exactness, StepRecord, earliest, first_divergence
from lightning_ft.rerun.step_values import LOSS, NORM, OWN_NORM, Measured


def record(step: int, loss: float = 1.0, weight: int = 7, **norms: float) -> StepRecord:
    names = {"own": OWN_NORM, "average": NORM}
    measured = [Measured(LOSS, loss, 0), *(Measured(names[key], value) for key, value in norms.items())]
    return StepRecord(step, {"weight": weight, "bias": 1}, measured)


def compare(before: list[StepRecord], now: list[StepRecord], exactness: Exactness | None = None) -> Divergence | None:
    return first_divergence(before, now, 1e-3, exactness or Exactness())


def test_the_first_thing_that_differs_is_told() -> None:
    same = [record(1), record(2)]
    assert compare(same, same) is None
    assert compare([*same, record(3, weight=8)], [*same, record(3, loss=2.0)]) == Divergence(
        3, "parameters", names=("weight",)
    )
    assert compare([*same, record(3, 1.0, own=1.0)], [*same, record(3, 1.0, own=2.0)]) == Divergence(3, OWN_NORM, 1.0, 2.0)
    assert compare([record(1), StepRecord(2, {})], [record(1), StepRecord(2, {})]) is None  # one that was left out


def test_a_device_that_computes_the_same_twice_has_no_tolerance_and_another_one_no_bits() -> None:
    exact = [record(step) for step in range(1, 5)]
    off = 1.0 + 1e-9
    known = Exactness()
    assert compare(exact, exact, known) is None
    assert compare([record(5)], [record(5, loss=off)], known) == Divergence(5, LOSS, 1.0, off)
    noisy = Exactness()
    first, again = [record(1), record(2, weight=1)], [record(1, loss=off), record(2, weight=2)]
    assert compare(first, again, noisy) is None
    assert compare(exact, exact, noisy) is None
    assert compare([record(5)], [record(5, loss=off)], noisy) is None  # too few came out the same
    assert compare([record(5)], [record(5, loss=1.1)], noisy) == Divergence(5, LOSS, 1.0, 1.1)


def test_who_differed_first_is_the_cause() -> None:
    loss, own, norm = Divergence(4, LOSS, 1.0, 2.0), Divergence(4, OWN_NORM, 1.0, 2.0), Divergence(4, NORM, 1.0, 2.0)
    memory = Divergence(4, "parameters", names=("weight",))
    assert earliest({0: None, 1: None}) == {}
    assert earliest({0: norm, 1: own, 2: norm}) == {1: own}
    assert earliest({0: norm, 1: norm}) == {0: norm, 1: norm}
    assert earliest({0: loss, 1: memory, 2: Divergence(3, NORM, 1.0, 2.0)}) == {2: Divergence(3, NORM, 1.0, 2.0)}
    assert earliest({0: loss, 1: memory}) == {1: memory}
