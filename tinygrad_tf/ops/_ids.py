"""Ids are checked where they come from, on the host; to look at them on a GPU would make the host wait for all that was launched."""
from ..backend import first_outside


def first_bad(ids, size):
    """The first id of a tensor that is not in [0, size); None where all are. Looks at the ids only where `Version.bounds` cannot tell."""
    low, high = ids.version.known_bounds()
    return None if 0 <= low and high < size else first_outside(ids.array, size)


def are_known_labels(ids, classes, ignore_index):
    """True where it is known without a look that every id is in [0, classes) or is `ignore_index`."""
    low, high = ids.version.known_bounds(apart_from=ignore_index)
    return 0 <= low and high < classes
