"""Sets of numbers as intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.intervals import IntervalSet


@given(st.lists(st.integers(0, 40)))
def test_it_is_a_set_of_the_fewest_intervals(numbers: list[int]) -> None:
    made = IntervalSet()
    for number in numbers:
        made.add(number)
    expected = set(numbers)
    assert len(made) == len(expected)
    assert {number for number in range(50) if number in made} == expected
    assert len(made.bounds()) == 2 * sum(number - 1 not in expected for number in expected)
    again = IntervalSet.of(made.bounds())
    assert (again.bounds(), len(again)) == (made.bounds(), len(made))


@pytest.mark.parametrize("bounds", [[1], [2, 1], [0, 0], [-1, 3], [0, 2, 2, 4]])
def test_other_numbers_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        IntervalSet.of(bounds)
