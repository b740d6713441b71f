"""No search for cycles while a plan is made; afterwards as before."""

import gc

import pytest

from malleus_megatron.migration.heap import no_search_for_cycles


@no_search_for_cycles()
def is_searching() -> bool:
    return gc.isenabled()


def test_the_search_goes_on_afterwards() -> None:
    assert gc.isenabled()
    assert not is_searching()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_search_for_cycles():
        assert not is_searching()
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_where_there_was_none_none_begins() -> None:
    """Megatron's `--manual-gc` turns it off for good."""
    gc.disable()
    try:
        assert not is_searching()
        assert not gc.isenabled()
    finally:
        gc.enable()
