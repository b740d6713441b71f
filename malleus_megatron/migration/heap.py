"""Python's memory while a plan for a large job is made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Garbage that refers to itself is not looked for; also a decorator.

    Planning makes and keeps millions of small objects, none of which refer to each other in a
    circle. To go through them again and again would take as long as the planning itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
