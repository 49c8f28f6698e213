"""Which GPUs a replica's ranks get: those with the most memory left. Pure; knows fractions, not devices."""

from collections.abc import Mapping

_TOLERANCE = 1e-6


class PlacementError(RuntimeError):
    """The replica does not fit; the text says what to lower."""


def place(used: Mapping[str, float], fraction: float, num_ranks: int, replica: str) -> list[str]:
    """The GPU of each rank, all different. `used` is each GPU's share already given away, in order of preference."""
    free = [gpu for gpu, share in used.items() if share + fraction <= 1.0 + _TOLERANCE]
    if len(free) < num_ranks:
        shares = ", ".join(f"GPU {gpu}: {share:.2f} taken" for gpu, share in used.items())
        raise PlacementError(
            f"{replica} needs {fraction:.2f} of {num_ranks} GPU(s), but {shares}; "
            "lower memory_fraction or replicas, or set rank.device to cpu"
        )
    return sorted(free, key=lambda gpu: used[gpu])[:num_ranks]
