"""Format numbers for readers: counts, bytes, seconds, shares, losses, learning rates."""

import math

_NONE = "-"


def count(number: float) -> str:
    """`9,999`, `12.3K`, `135M`, `8.03B`: exact below ten thousand, otherwise three digits."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= scale * 0.9995:  # 999,950 is 1.00M, not 1000K
            return f"{_three_digits(number / scale)}{letter}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes as `512 B`, `3.07 MiB`, `71.5 GiB`."""
    scaled, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1000 or unit == "TiB":
            break
        scaled /= 1024
    return f"{scaled:.0f} B" if unit == "B" else f"{_three_digits(scaled)} {unit}"


def duration(seconds: float) -> str:
    """`0.42 s`, `45 s`, `2 min 31 s`, `1 h 05 min`, `2 d 3 h`."""
    if not math.isfinite(seconds):
        return _NONE
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes == 0:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60:02d} s"
    if days == 0:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24} h"


def share(part: float, whole: float) -> str:
    """A percentage such as `0.9 %`; a dash if `whole` is 0."""
    if not whole:
        return _NONE
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 99.95 or percent == 0 else f"{percent:.2g} %"


def loss(value: float) -> str:
    """A loss with four decimals, enough to compare two runs."""
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def learning_rate(value: float) -> str:
    """`2e-4`, `1.53e-5`: without zeros in front of the exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"
