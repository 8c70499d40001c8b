"""Real ranks: what they return, how they fail, and that none is left."""

import multiprocessing
import os
import time

import torch
import torch.distributed as dist

from deltaspan.verify.processes import RanksFailed, run_on_ranks

FOR_EVER_S = 1000


def work(item: str, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """One rank's part: gathers the ranks' numbers, unless rank 1 is to misbehave."""
    rank = dist.get_rank(group)
    if rank == 1:
        if item == "raise":
            raise ValueError("broken on purpose")
        if item == "end":
            os._exit(3)
        if item == "hang":
            time.sleep(FOR_EVER_S)
    everyone = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, torch.full((1,), float(rank)), group=group)
    return {"everyone": torch.cat(everyone), "rank": torch.tensor(rank)}


def test_a_failure_is_told_and_the_next_item_goes_on_until_it_happens_too_often() -> None:
    items, seen = ["fine", "raise", "fine", "end", "fine", "hang", "fine"], []
    before = multiprocessing.active_children()
    outcomes = run_on_ranks(work, items, 2, lambda done, total: seen.append((done, total)), patience_s=2.0)
    assert multiprocessing.active_children() == before
    assert seen == [(done, 7) for done in range(1, 7)]
    for outcome in (outcomes[0], outcomes[2], outcomes[4]):
        assert [result["rank"].item() for result in outcome] == [0, 1]
        assert all(result["everyone"].tolist() == [0.0, 1.0] for result in outcome)
    failures = [outcome for outcome in outcomes if isinstance(outcome, RanksFailed)]
    raised, ended, hung, given_up = map(str, failures)
    assert "rank 1: ValueError: broken on purpose" in raised
    assert "rank 1: ended with exit code 3 and said nothing" in ended
    assert hung == "no word from ranks [0, 1] within 2 s"
    assert "not run" in given_up
