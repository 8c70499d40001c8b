"""Into how many segments each rank cuts its fragments: one rule a name."""

from deltaspan.layout import Partition


def _one(part: Partition, hv: int, sm_count: int) -> list[int]:
    return [1] * part.world_size


RULES = {"one": _one}


def plan_segments(part: Partition, *, hv: int, sm_count: int, rule: str = "one") -> list[int]:
    """Segments per fragment, one int per rank: a pure function of the partition, alike on every rank.

    Args:
        part: the partition.
        hv: value heads, at least 1.
        sm_count: multiprocessors of a rank's device, at least 1.
        rule: the planner's rule. `one` leaves every fragment whole.

    Raises:
        ValueError: an unknown rule, or a count below 1.
    """
    check_rule(rule)
    for name, value in (("hv", hv), ("sm_count", sm_count)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return RULES[rule](part, hv, sm_count)


def check_rule(rule: str) -> None:
    if not isinstance(rule, str):
        raise TypeError(f"rule must be the name of one, got {rule!r}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {sorted(RULES)}, got {rule!r}")
