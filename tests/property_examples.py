"""How many examples of a property are tried: fewer in the fast lane (`conftest.py`)."""

from hypothesis import settings

USUAL = 100  # what hypothesis tries by itself


def examples(number):
    """Try ``number`` examples, or as many fewer as the profile that is loaded asks for."""
    return settings(max_examples=max(1, number * settings().max_examples // USUAL))
