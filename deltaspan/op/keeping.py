"""Which tensors an autograd node of the operation saves, in which order, and how its backward gets them back."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deltaspan.op.forward import Forward
from deltaspan.op.options import Options
from deltaspan.op.recompute import Region, mark, places
from deltaspan.op.saved import Saved


@dataclass(frozen=True)
class Keeping:
    """What one run of a forward saves.

    Inside a checkpoint a `light` forward saves places for what the stages leave, which cost nothing there. A recompute
    may fill them, and its backward then need not run the stages again. A mark says whether it did, so that the backward
    never takes a place for what belongs there.
    """

    boundary: int  # tensors of a rank: states and maps at seams
    tape: int  # tensors of a rank: what the stages leave, or places for it
    marked: bool  # whether they are places that may be filled
    filled: bool
    output: bool  # whether anybody may read the output

    @classmethod
    def of(
        cls, options: Options, region: Region | None, given: Sequence[Tensor | None], ranks: int, tape: int
    ) -> "Keeping":
        """given: the operands, which are saved in front. tape: how many tensors the stages of a rank leave."""
        full = options.save_mode == "full"
        marked = options.keeps and not full and region is not None and options.reuse_recompute_tapes is not False
        boundary = (3 if options.save_transfer else 1) if options.keeps else 0
        tape = tape if options.keeps and (full or marked) else 0
        saved = sum(t is not None for t in given) + ranks * (boundary + tape) + marked
        last = region is not None and region.ends_after(saved)
        handed_on = region is not None and region.recomputing and (options.reuse_recompute_tapes is True or last)
        return cls(boundary, tape, marked, full or handed_on, not (last and options.recompute_output == "auto"))

    def tensors(self, options: Options, done: Sequence[Forward]) -> list[Tensor]:
        """What is saved behind the operands, rank by rank."""
        kept: list[Tensor] = []
        for f in done:
            kept += f.saved.of_mode(options).boundary if self.boundary else ()
            if self.tape:
                kept += f.tape if self.filled else places(f.tape)
        return [*kept, mark(self.filled)] if self.marked else kept

    def restore(self, templates: Sequence[Saved], tensors: Sequence[Tensor]) -> list[Saved | None]:
        """By rank, from `tensors` and what is no tensor of the same forward; None where nothing was kept."""
        if not self.boundary:
            return [None] * len(templates)
        *tensors, last = tensors if self.marked else (*tensors, None)
        filled = self.filled if last is None else bool(last)
        size, found = self.boundary + self.tape, []
        for rank, template in enumerate(templates):
            own = tuple(tensors[size * rank : size * (rank + 1)])
            found.append(template.with_tensors(own[: self.boundary], own[self.boundary :] if filled else ()))
        return found
