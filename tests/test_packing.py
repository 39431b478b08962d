"""First-fit decreasing: which rows share a pack."""

import random

import pytest

from megatrain_verl.packing import first_fit_decreasing


def plain_first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """The definition, in O(n * groups)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = (group for group in groups if sum(lengths[member] for member in group) + lengths[index] <= budget)
        group = next(fitting, None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9, 200])
def test_groups_are_those_of_the_definition(rows: int) -> None:
    generator = random.Random(rows)
    for budget in (40, 64, 100):
        lengths = [generator.randint(1, 40) for _ in range(rows)]
        assert first_fit_decreasing(lengths, budget) == plain_first_fit_decreasing(lengths, budget)


def test_known_example() -> None:
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]


def test_row_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 11 tokens does not fit into a pack of 10"):
        first_fit_decreasing([3, 11], 10)
