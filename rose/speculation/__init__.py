"""Speculative decoding: who drafts, how drafts are verified, how many there are. Knows no process."""
