"""Tests of rose.sampling."""
