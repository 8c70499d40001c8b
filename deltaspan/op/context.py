"""A context: one batch's partition, plan, tables and group, built once and shared by every layer."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltaspan.exchange import AllGather, Program, Transport, gather_tokens, scatter_gradient, transport
from deltaspan.kernels.select import check_device, has_hopper
from deltaspan.layout import Partition
from deltaspan.layout.pack import as_int
from deltaspan.op.operands import check_tensor
from deltaspan.op.segments import Segments, cut
from deltaspan.op.together import always, anchor
from deltaspan.op.view import GroupView, RankView, group_view, rank_view
from deltaspan.plan import DEFAULT_RULE, HOPPER_RULE, Cut, check_rule, plan_segments

DEFAULT_SM_COUNT = 132  # an H100's or H200's


class Context:
    """What the operation and the convolution need to know of a batch; immutable, independent of tensor contents.

    part: the partition.                  rank: this rank, None for a simulated group.
    conv_kernel_size, p_rule, sm_count:   as given to `build_context`, or chosen by it.
    tokens: this rank's token count.      device: where its tables lie and its operands must.
    cu_seqlens: int32 [fragments + 1], local offsets.        position_ids: int64 [tokens], within the document.
    For a simulated group tokens, cu_seqlens and position_ids are lists, one entry a rank.

    A plain class, no dataclass, so that walks over a module's inputs pass it on as one opaque leaf.
    """

    __slots__ = (
        "__weakref__",
        "_cuts",
        "_group",
        "_plans",
        "_simulated",
        "_transport",
        "_views",
        "conv_kernel_size",
        "device",
        "p_rule",
        "part",
        "sm_count",
    )

    part: Partition
    device: torch.device
    conv_kernel_size: int
    p_rule: str
    sm_count: int
    _transport: Transport
    _views: tuple[RankView, ...]
    _group: GroupView
    _simulated: bool
    _plans: dict[int, list[Cut]]  # by value heads: segments of a fragment, by rank
    _cuts: dict[tuple[int, Cut, int], Segments]  # by rank, segments of a fragment and value heads

    def __init__(self, **fields: Any) -> None:
        for name, value in {**fields, "_plans": {}, "_cuts": {}}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"a context is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"a context is immutable: cannot delete {name}")

    def __deepcopy__(self, memo: dict) -> "Context":
        return self

    def __reduce__(self) -> tuple:
        raise TypeError("a context belongs to its process and group: send the partition and build it there")

    def __repr__(self) -> str:
        where = "all ranks simulated" if self._simulated else f"rank {self.rank}"
        return f"<Context of {self.part!r}, {where}, on {self.device}>"

    @property
    def rank(self) -> int | None:
        return None if self._simulated else self._views[0].rank

    @property
    def tokens(self) -> int | list[int]:
        return self._each(lambda view: view.tokens)

    @property
    def cu_seqlens(self) -> Tensor | list[Tensor]:
        return self._each(lambda view: view.cu_seqlens)

    @property
    def position_ids(self) -> Tensor | list[Tensor]:
        return self._each(lambda view: view.position_ids)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor | list[Tensor]:
        """This rank's tokens of a whole pack that every rank holds alike.

        x: any shape with at least `part.total_tokens` tokens along `dim`; a tail beyond them belongs to no rank.
        Its gradient is this rank's part of the whole gradient, zero elsewhere. No rank is asked for anything.

        Raises:
            ValueError: too few tokens along `dim`, or a tensor on another device.
        """
        _check_tokens(x, dim, self, "at least", self.part.total_tokens)
        return self._each(lambda view: x.index_select(dim, view.token_ids))

    @always
    def unshard(self, x_local: Tensor | list[Tensor], dim: int = 1, total: int | None = None) -> Tensor | list[Tensor]:
        """The whole pack in global order on every rank, from every rank's tokens along `dim`: the inverse of `shard`.

        total: tokens of the result along `dim`, at least `part.total_tokens` (the default); the tail is zero.
        Its gradient is the sum over ranks of their gradients of this rank's tokens, added in the order of ranks.
        Wherever gradients are recorded the result wants one, also of an input that does not: `detach` it to look at it.

        Raises:
            ValueError: a token count other than this rank's, a `total` that is too small, or another device.
        """
        shards = self._listed("x_local", x_local)
        for view, x in zip(self._views, shards, strict=True):
            _check_tokens(x, dim, self, "exactly", view.tokens)
        total = self.part.total_tokens if total is None else as_int("total", total, minimum=0)
        if total < self.part.total_tokens:
            raise ValueError(f"total must be at least the pack's {self.part.total_tokens} tokens, got {total}")
        return self._unlisted(_Unshard.apply(self, dim, total, anchor(self), *shards))

    def _segments(self, rank: int, hv: int, given: Cut | None) -> Cut:
        """Into how many segments a rank cuts each fragment for so many value heads: as given, else as planned."""
        if given is not None:
            return given
        if hv not in self._plans:
            self._plans[hv] = plan_segments(self.part, hv=hv, sm_count=self.sm_count, rule=self.p_rule)
        return self._plans[hv][rank]

    def _cut(self, view: RankView, hv: int, given: Cut | None) -> Segments:
        """A rank's segments on its device; made at the first call that wants them."""
        key = view.rank, self._segments(view.rank, hv, given), hv
        if key not in self._cuts:
            self._cuts[key] = cut(view, *key[1:], self.sm_count, beside=self._transport.beside)
        return self._cuts[key]

    def _each(self, read: Any) -> Any:
        return self._unlisted([read(view) for view in self._views])

    def _unlisted(self, values: Any) -> Any:
        return list(values) if self._simulated else values[0]

    def _listed(self, name: str, value: Any) -> list:
        """One operand a rank that runs here: what it was given, or the given list's entries with a simulated group."""
        if not self._simulated:
            return [value]
        if not isinstance(value, list) or len(value) != len(self._views):
            found = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
            raise ValueError(f"{name} must be a list of {len(self._views)} shards with a simulated group, got {found}")
        return value

    def _replicated(self, name: str, value: Any) -> list:
        """One operand a rank that is alike on all: the given one for each, or with a simulated group a list of them."""
        return self._listed(name, value) if isinstance(value, list) else [value] * len(self._views)


@torch.inference_mode(False)  # the tables outlive whatever mode the context is built in
def build_context(
    part: Partition,
    group: object = None,
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
    conv_kernel_size: int = 4,
    p_rule: str | None = None,
    sm_count: int | None = None,
) -> Context:
    """Builds what one batch's layers share. With a process group this is a collective: every rank calls it.

    Args:
        part: the partition; its world size must be the group's.
        group: a ProcessGroup, a 1-D DeviceMesh, a SimulatedGroup, or None for one rank.
        rank: this rank; only to be checked against the group's own idea.
        device: of the operands. Default: the current CUDA device; the CPU if there is none or the group has gloo alone.
        conv_kernel_size: taps of the convolution, at least 1.
        p_rule: the planner's rule (`deltaspan.plan.RULES`). Default: `least_time` on a device that the Hopper tier runs
            on, else `row_cost_lpt`.
        sm_count: multiprocessors to plan for. Default: the device's, or 132 without a GPU.

    Raises:
        TypeError: `part` is no partition, `group` no group, or `device` no device.
        ValueError: a value out of range, or one on which the ranks of the group disagree (on every rank).
    """
    link = transport(group)
    link.begin()
    try:
        device, p_rule, sm_count = _check(part, link, group, rank, device, conv_kernel_size, p_rule, sm_count)
    except Exception as error:  # the others are about to compare their contexts with this rank's
        link.announce(error, link.default_device())
        raise
    shared = {"part": part.digest(), "p_rule": p_rule, "sm_count": sm_count, "conv_kernel_size": conv_kernel_size}
    link.run([_agree(link.world_size, shared, device) for _ in link.ranks])
    whole = group_view(part, device)
    return Context(
        part=part,
        device=device,
        conv_kernel_size=conv_kernel_size,
        p_rule=p_rule,
        sm_count=sm_count,
        _transport=link,
        _views=tuple(rank_view(part, r, whole, conv_kernel_size, device) for r in link.ranks),
        _group=whole,
        _simulated=group is link,
    )


def _check(
    part: Partition,
    link: Transport,
    group: object,
    rank: int | None,
    device: torch.device | str | None,
    conv_kernel_size: int,
    p_rule: str | None,
    sm_count: int | None,
) -> tuple[torch.device, str, int]:
    """The device, rule and multiprocessors, once the arguments of `build_context` are found to fit."""
    if not isinstance(part, Partition):
        raise TypeError(f"part must be a Partition, from deltaspan.partition, got {type(part).__name__}")
    as_int("conv_kernel_size", conv_kernel_size, minimum=1)
    if p_rule is not None:
        check_rule(p_rule, name="p_rule")
    if link.world_size != part.world_size:
        size = f"a group of {link.world_size} ranks" if group is not None else "no group, which is one rank"
        raise ValueError(f"part is for {part.world_size} ranks, but there is {size}")
    simulated = group is link
    if rank is not None and (simulated or rank != link.ranks[0]):
        raise ValueError(f"rank must be the group's own{'' if simulated else f', {link.ranks[0]}'}, got {rank}")
    device = check_device(link.default_device() if device is None else device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    sm_count = multiprocessors(device) if sm_count is None else as_int("sm_count", sm_count, minimum=1)
    return device, p_rule or default_rule(device), sm_count


def default_rule(device: torch.device) -> str:
    """What a context plans by unless it is told."""
    return HOPPER_RULE if has_hopper(device) else DEFAULT_RULE


def multiprocessors(device: torch.device) -> int:
    """What a context plans for unless it is told."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else DEFAULT_SM_COUNT


def _agree(world_size: int, shared: dict[str, object], device: torch.device) -> Program[None]:
    """Compares what ranks must share by digest; every rank sees every digest, so all raise or none."""
    digests = np.stack([np.frombuffer(hashlib.sha256(repr(v).encode()).digest(), np.int64) for v in shared.values()])
    mine = torch.from_numpy(digests)[None].to(device)
    everyone = yield AllGather("context_digest", mine, (1,) * world_size)
    differs = (everyone != everyone[:1]).any(-1).cpu()
    if differs.any():
        ranks, items = differs.nonzero(as_tuple=True)
        names = list(shared)
        found = "; ".join(f"rank {r}: {names[i]}" for r, i in zip(ranks.tolist(), items.tolist(), strict=True))
        raise ValueError(f"the ranks of a group must build the same context; these differ from rank 0: {found}")


def _check_tokens(x: Tensor, dim: int, ctx: Context, bound: str, tokens: int) -> None:
    check_tensor("x", x, ctx.device)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be an axis of a tensor of shape {tuple(x.shape)}, got {dim}")
    if x.shape[dim] < tokens or (bound == "exactly" and x.shape[dim] != tokens):
        raise ValueError(f"x must have {bound} {tokens} tokens along dim {dim}, got shape {tuple(x.shape)}")


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        fn: Any, ctx: Context, dim: int, total: int, anchor: Tensor | None, *shards: Tensor
    ) -> tuple[Tensor, ...]:
        fn.context, fn.dim = ctx, dim
        group = ctx._group
        rows = ctx._transport.run([gather_tokens(x.movedim(dim, 0), group.tokens, group.place) for x in shards])
        wholes = [x.new_zeros(total, *x.shape[1:]) for x in rows]
        for whole, x in zip(wholes, rows, strict=True):
            whole[: len(x)] = x
        return tuple(whole.movedim(0, dim) for whole in wholes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @always
    def backward(fn: Any, *grads: Tensor) -> tuple:
        ctx, group = fn.context, fn.context._group
        shards = ctx._transport.run(
            [
                scatter_gradient(grad.movedim(fn.dim, 0), view.rank, group.tokens, group.order)
                for view, grad in zip(ctx._views, grads, strict=True)
            ]
        )
        return None, None, None, None, *(x.movedim(0, fn.dim) for x in shards)
