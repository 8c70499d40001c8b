"""The shards that are timed are those that they are named after."""

import json
from importlib.resources import files
from itertools import accumulate

import pytest

import deltaspan as ds
from deltaspan.bench.shards import LOCAL_SHARDS, local_shard, shards_of_packs
from deltaspan.plan import plan_segments, walk_steps

PACKS = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"]


@pytest.mark.parametrize("name", [name for name, (pack, *_) in LOCAL_SHARDS.items() if pack in PACKS])
def test_named_shards_are_what_the_last_rank_holds(name: str) -> None:
    pack, cp, lengths = LOCAL_SHARDS[name]
    part = ds.partition([0, *accumulate(PACKS[pack])], cp)
    assert part.table.length[part.rows(cp - 1)].tolist() == list(lengths)


def test_shards_of_equal_documents() -> None:
    assert local_shard("4x8192").documents == [8192] * 4
    assert local_shard("3x7").documents == [7, 7, 7]
    assert (local_shard("3x7").layout, local_shard("3x7").slowest_rank) == ("local", None)


@pytest.mark.parametrize("name", ["P4", "0x5", "5x0", "x5", "all", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^shards must be all, or some of P4/2, .* got '"):
        local_shard(name)


def test_equal_documents_are_bounded_in_tokens() -> None:
    for name in ("1x16777217", "16777217x1", "99999999999x99999999999"):
        with pytest.raises(ValueError, match=f"^shards must have at most 16,777,216 tokens each, got '{name}'$"):
            local_shard(name)
    assert local_shard("1x16777216").documents == [1 << 24]


@pytest.mark.parametrize("rule", ["row_cost_lpt", "occ"])
def test_the_rank_with_most_walk_steps_is_timed_alone_then_all_together(rule: str) -> None:
    lengths = [700, 0, 64, 6000, 300]
    alone, together = shards_of_packs({"X": lengths}, [3], ["zigzag"], hv=48, sm_count=132, rule=rule)
    part = ds.partition([0, *accumulate(lengths)], 3, layout="zigzag")
    steps = walk_steps(part, plan_segments(part, hv=48, sm_count=132, rule=rule), hv=48, sm_count=132)
    assert len(set(steps)) > 1 and steps[alone.slowest_rank] == max(steps)
    assert alone.documents == part.table.length[part.rows(alone.slowest_rank)].tolist()
    assert (alone.layout, alone.cut_by, alone.part.world_size) == ("local", "zigzag", 1)
    assert together.part.fragments == part.fragments and together.layout == "zigzag"
    assert (alone.pack, alone.cp, together.pack, together.cp) == ("X", 3, "X", 3)


def test_empty_fragments_are_no_documents_of_a_local_shard() -> None:
    alone, _ = shards_of_packs({"X": [0, 1, 90]}, [4], ["zigzag_per_document"], hv=4, sm_count=132, rule="one")
    assert alone.documents and min(alone.documents) > 0


def test_all_layouts_and_every_combination() -> None:
    shards = list(shards_of_packs({"X": [90], "Y": [70, 9]}, [1, 2], ["all"], hv=4, sm_count=132, rule="one"))
    assert len(shards) == 2 * 3 * (1 + 2)  # a group of one has no second row
    with pytest.raises(ValueError, match="layout must be one of"):
        list(shards_of_packs({"X": [90]}, [2], ["all", "zag"], hv=4, sm_count=132, rule="one"))
