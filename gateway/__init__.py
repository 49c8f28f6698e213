"""Ivy, the HTTP gateway: text and HTTP on one side, token ids for schedulers on the other."""
