"""Paths as people write them, made absolute. Knows `~` and what no file may be called; reads no file."""

from pathlib import Path


class PathError(ValueError):
    """Text that cannot be a path; it says why."""


def absolute_path(text: str, base: Path) -> Path:
    """`text`, relative to `base` if it is relative; `~` and `~user` are home directories. Raises PathError."""
    if "\0" in text:
        raise PathError(f"{text!r} holds a zero character, which no path may")
    try:
        return base / Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise PathError(f"{text!r}: nothing is known of a home directory {user}; write the path out") from None
