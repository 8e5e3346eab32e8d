"""Sizes that plans round up."""


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
