"""Quantities as people write them: 6 s, 2 min 10 s, 105 MB, 3.2 TFLOPs; and the unit that suits an axis."""

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def size(count: float) -> str:
    """Bytes."""
    return _prefixed(count, "B")


def flops(count: float) -> str:
    return _prefixed(count, "FLOPs")


def duration(seconds: float) -> str:
    """The two largest units of it."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for large, small, name, rest in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            count, left = divmod(whole, large)
            left //= small
            return f"{count} {name} {left} {rest}" if left else f"{count} {name}"
    return f"{whole} s"


def unit_of(most: float, unit: str) -> tuple[float, str]:
    """What to divide by, and what it is called, where an axis reaches to `most`."""
    factor, prefix = next((each for each in PREFIXES if float(f"{most:.3g}") >= each[0]), PREFIXES[-1])
    return factor, f"{prefix}{unit}"


def time_unit_of(longest: float) -> tuple[float, str]:
    """The same of seconds."""
    return next((each for each in ((3600.0, "hours"), (60.0, "minutes")) if longest >= 2 * each[0]), (1.0, "seconds"))


def _prefixed(count: float, unit: str) -> str:
    factor, name = unit_of(count, unit)
    return f"{count / factor:.3g} {name}"
