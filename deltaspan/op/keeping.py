"""Which tensors an autograd node of the operation saves, in which order, and how its backward gets them back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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
    never takes a place for what belongs there. Tensors without elements are kept beside those that are saved, since
    every one of these takes its way through a checkpoint's hooks, three times.
    """

    keeps: bool  # whether there is anything to restore
    boundary: Sequence[tuple[str, ...]]  # by rank, what is saved of states and maps at seams
    tape: int  # tensors of a rank: what the stages leave, or places for it
    marked: bool  # whether they are places that may be filled
    filled: bool
    output: bool  # whether anybody may read the output

    @classmethod
    def of(
        cls,
        options: Options,
        region: Region | None,
        given: Sequence[Tensor | None],
        boundary: Sequence[tuple[str, ...]],
        tape: int,
    ) -> "Keeping":
        """given: the operands, which are saved in front. boundary: by rank, as `saved_at_seams` has it. tape: how many
        tensors the stages of a rank leave."""
        full = options.save_mode == "full"
        marked = options.keeps and not full and region is not None and options.reuse_recompute_tapes is not False
        tape = tape if options.keeps and (full or marked) else 0
        saved = sum([t is not None for t in given]) + sum(map(len, boundary)) + len(boundary) * tape + marked
        last = region is not None and region.ends_after(saved)
        handed_on = region is not None and region.recomputing and (options.reuse_recompute_tapes is True or last)
        output = not (last and options.recompute_output == "auto")
        return cls(options.keeps, boundary, tape, marked, full or handed_on, output)

    def tensors(self, done: Sequence[Forward]) -> list[Tensor]:
        """What is saved behind the operands, rank by rank."""
        kept: list[Tensor] = []
        for f, names in zip(done, self.boundary, strict=True):
            kept += [getattr(f.saved, name) for name in names]
            if self.tape:
                kept += f.tape if self.filled else places(f.tape)
        return [*kept, mark(self.filled)] if self.marked else kept

    def templates(self, options: Options, done: Sequence[Forward]) -> list[Saved | None]:
        """By rank, what is kept without being saved; None where nothing is kept."""
        if not self.keeps:
            return [None] * len(done)
        ranks = zip(done, self.boundary, strict=True)
        return [f.saved.of_mode(options).holding(dict.fromkeys(names), ()) for f, names in ranks]

    def restore(self, templates: Sequence[Saved | None], tensors: Sequence[Tensor]) -> list[Saved | None]:
        """By rank, from `tensors` and the templates of the same forward."""
        if not self.keeps:
            return list(templates)
        *tensors, last = tensors if self.marked else (*tensors, None)
        filled = self.filled if last is None else bool(last)
        left, found = iter(tensors), []
        for names, template in zip(self.boundary, templates, strict=True):
            own, tape = {name: next(left) for name in names}, tuple(islice(left, self.tape))
            found.append(template.holding(own, tape if filled else ()))
        return found
