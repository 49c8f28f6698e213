"""A histogram as processes count it and as ProcessStats carries it. Knows nothing of what is measured."""

from bisect import bisect_left


class Histogram:
    """Counts of values at most each of `bounds`, which ascend; not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self, name: str, labels: str = "") -> dict[str, float]:
        """`_bucket`, `_sum` and `_count` samples; buckets are cumulative. `labels` as in `a="b",c="d"`."""
        values, total = {}, 0
        before = f"{labels}," if labels else ""
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            values[f'{name}_bucket{{{before}le="{bound}"}}'] = float(total)
        suffix = f"{{{labels}}}" if labels else ""
        values[f"{name}_sum{suffix}"] = self.sum
        values[f"{name}_count{suffix}"] = float(total)
        return values
