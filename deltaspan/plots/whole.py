"""What a record must hold to be drawn: each check raises ValueError with the first thing that is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from deltaspan.layout import Pack, partition

SIDE_TIMES = ("forward", "step")
LARGEST = 1e15  # number that an axis shows
LONGEST_SHOWN = 60  # characters of a wrong value

Accepts = Callable[[Any], bool]


def check_plan(record: Mapping[str, Any], at: str = "") -> None:
    """A plan's lengths, cp, layout, rule, fragments and segments, which must agree.

    at: where the plan stands in its record, such as "partition.".

    Raises:
        ValueError: something is missing, of a wrong kind, or does not fit the rest.
    """
    lengths = _held(record, "lengths", _is_list_of(_is_count), "a list of whole numbers from 0 on", at)
    cp = _held(record, "cp", lambda value: _is_count(value) and value > 0, "a whole number from 1 on", at)
    _held(record, "layout", _is_text, "a name", at)
    _held(record, "rule", _is_text, "a name", at)
    if record.get("pack") is not None:
        _held(record, "pack", _is_text, "a name or null", at)
    of_ranks = f"a list of {cp:,}, one for each rank"
    fragments = _held(record, "fragments", _is_list_of(_is_list_of(_is_list), cp), f"{of_ranks}, of fragments", at)
    _held(record, "segments", _is_list_of(_is_cut, cp), f"{of_ranks}, of numbers from 1 on or lists of such", at)
    try:
        partition(Pack.from_lengths(lengths).cu_seqlens, cp, fragments=fragments)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"record must hold every token once, and its {at}{error}") from None


def check_demo(record: Mapping[str, Any]) -> None:
    """A demo's settings, losses and bounds, and its partition.

    Raises:
        ValueError: something is missing or of a wrong kind.
    """
    settings = _held(record, "settings", _is_mapping, "a mapping")
    _held(settings, "ranks", _is_count, "a whole number", "settings.")
    _held(settings, "layout", _is_text, "a name", "settings.")
    losses = _held(record, "losses", _is_mapping, "a mapping")
    # A loss may be NaN: a run that failed is drawn too.
    many = _held(losses, "ranks", lambda value: value and _is_list_of(_is_number)(value), "numbers", "losses.")
    _held(losses, "one", _is_list_of(_is_number, len(many)), f"a list of {len(many):,} numbers", "losses.")
    bounds = _held(record, "bounds", _is_mapping, "a mapping")
    _held(bounds, "loss", lambda value: _is_finite(value) and value > 0, "a number above 0", "bounds.")
    _held(bounds, "judged_steps", _is_count, "a whole number", "bounds.")
    check_plan(_held(record, "partition", _is_mapping, "a mapping"), "partition.")


def check_bench(record: Mapping[str, Any]) -> None:
    """A benchmark's heads, machine and decay, and in each of its rows what the pictures show.

    Raises:
        ValueError: something is missing or of a wrong kind, or there is no row.
    """
    _held(record, "heads", _is_list_of(_is_count, 2), "two whole numbers")
    machine = _held(record, "machine", _is_mapping, "a mapping")
    for name in machine.keys() & {"gpu", "platform"}:
        _held(machine, name, _is_text, "a name", "machine.")
    _held(record, "decay", _is_text, "a name")
    if "phases" in record:
        _held(record, "phases", lambda value: value in (["forward"], list(SIDE_TIMES)), "forward, with step or alone,")
    rows = _held(record, "rows", lambda value: value and _is_list_of(_is_mapping)(value), "a row or more")
    for i, row in enumerate(rows):
        at = f"rows[{i}]."
        _held(row, "name", _is_text, "a name", at)
        _held(row, "tokens", _is_count, "a whole number", at)
        _held(row, "steady", lambda value: isinstance(value, bool), "true or false", at)
        _check_side(row, at)
        for name in _held(
            row, "peers", lambda value: _is_mapping(value) and all(map(_is_text, value)), "sides by name", at
        ):
            _check_side(_held(row["peers"], name, _is_mapping, "a mapping", f"{at}peers."), f"{at}peers.{name}.")


def _check_side(side: Mapping[str, Any], at: str) -> None:
    for what in SIDE_TIMES:
        may_be = "a number above 0, or null if it was not timed"
        ms = _held(side, f"{what}_ms", lambda value: value is None or (_is_finite(value) and value > 0), may_be, at)
        if ms is not None:
            spread = _held(side, "spread", _is_mapping, "a mapping", at)
            measures = _held(spread, what, _is_mapping, "a mapping", f"{at}spread.")
            for quartile in ("quartile_1", "quartile_3"):
                _held(measures, quartile, _is_finite, "a number", f"{at}spread.{what}.")


def _held(holder: Mapping[str, Any], key: str, accepts: Accepts, what: str, at: str = "") -> Any:
    """What the holder has under a key, if it is accepted.

    what: is accepted, in words. at: where the holder stands in the record.
    """
    if key not in holder:
        raise ValueError(f"record must have {what} as {at}{key}, and has nothing there")
    if not accepts(value := holder[key]):
        found = repr(value)
        shown = found if len(found) <= LONGEST_SHOWN else found[:LONGEST_SHOWN] + "..."
        raise ValueError(f"record must have {what} as {at}{key}, got {shown}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_list_of(accepts: Accepts, count: int | None = None) -> Accepts:
    return lambda value: _is_list(value) and count in (None, len(value)) and all(map(accepts, value))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and "$" not in value  # which would open a formula


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) and not isfinite(value)) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_cut(value: Any) -> bool:
    """How many segments, or their relative lengths."""
    shares = value if isinstance(value, list | tuple) and value else [value]
    return all(_is_count(share) and share > 0 for share in shares)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_finite(value) and value >= 0
