"""How texts are cut into pieces in the tests of everything that reads them as they come."""

from hypothesis import strategies as st

cuts = st.lists(st.integers(0, 200), max_size=12)


def cut(text: str, at: list[int]) -> list[str]:
    """`text` in pieces, some perhaps empty; one a character for no places."""
    if not at:
        return list(text)
    places = sorted({place % (len(text) + 1) for place in at})
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
