"""Where tokens live: packs of documents, their partition over ranks, and who neighbours whom. Knows no torch."""

from deltaspan.layout.fragments import Fragment, FragmentTable, Partition
from deltaspan.layout.neighbours import Chains, HaloPlan, halo_plan
from deltaspan.layout.pack import Pack, Span
from deltaspan.layout.partition import LAYOUTS, near_equal, partition

__all__ = [
    "LAYOUTS",
    "Chains",
    "Fragment",
    "FragmentTable",
    "HaloPlan",
    "Pack",
    "Partition",
    "Span",
    "halo_plan",
    "near_equal",
    "partition",
]
