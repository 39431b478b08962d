"""Which rows share a pack of at most so many tokens: first-fit decreasing (Johnson, 1973)."""

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths`, grouped so that no group's lengths sum to more than `budget`.

    The longest comes first, equal ones in their order; each goes into the first group that has room. At most 11/9 of
    the fewest possible groups (and 6/9 of one) are made. O(n log n).

    Raises:
        ValueError: a length is more than `budget`.
    """
    groups: list[list[int]] = []
    room = _FirstWithRoom(len(lengths))
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > budget:
            raise ValueError(f"a row of {length} tokens does not fit into a pack of {budget}")
        group = room.first(length)
        if group is None:
            group = len(groups)
            groups.append([])
            room.set(group, budget)
        groups[group].append(index)
        room.add(group, -length)
    return groups


class _FirstWithRoom:
    """The room in each of `size` groups, as a tree of maxima that finds the first with enough in O(log size)."""

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(size - 1, 0).bit_length()
        self._most = [-1] * (2 * self._leaves)  # node i has the children 2i and 2i + 1; -1: no group yet

    def first(self, length: int) -> int | None:
        if self._most[1] < length:
            return None
        node = 1
        while node < self._leaves:
            node *= 2
            if self._most[node] < length:
                node += 1
        return node - self._leaves

    def set(self, group: int, room: int) -> None:
        node = group + self._leaves
        self._most[node] = room
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def add(self, group: int, room: int) -> None:
        self.set(group, self._most[group + self._leaves] + room)
