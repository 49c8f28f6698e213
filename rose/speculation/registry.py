"""The proposers that can be configured, by the name in `speculation.proposer`."""

from collections.abc import Mapping

from rose.speculation.n_gram import load_n_gram
from rose.speculation.protocol import LoadProposer

PROPOSERS: Mapping[str, LoadProposer] = {"n_gram": load_n_gram}
