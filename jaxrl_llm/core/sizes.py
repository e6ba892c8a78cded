"""Sizes of arrays: each new one compiles a program, so sizes that vary are rounded up."""


def power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``, and at least 1.

    Example:
      >>> [power_of_two(n) for n in (0, 1, 5, 8)]
      [1, 1, 8, 8]
    """
    return 1 << max(count - 1, 0).bit_length()
