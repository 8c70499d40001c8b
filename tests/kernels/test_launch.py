"""What a launch hands to the device, and what a call takes of the host: by Triton itself, but without a device."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.op import again

pytestmark = pytest.mark.triton
pytest.importorskip("triton")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from deltaspan.kernels.hopper import gluon
    from tests.kernels.driver import installed

    monkeypatch.setattr(select, "_beyond_hopper", lambda *args, **call: None)
    monkeypatch.setattr(gluon, "_READY", {})
    select._chosen.cache_clear()
    with installed() as made:
        yield made
    select._chosen.cache_clear()


def rule(
    tokens: int, segments: int, wants: bool = False, H: int = 1, HV: int = 1, **options: Any
) -> tuple[Callable, list[Tensor]]:
    ctx = ds.build_context(ds.partition([0, tokens], 1), device="cpu")
    q, k, v = (torch.zeros(1, tokens, heads, 128, dtype=torch.bfloat16) for heads in (H, H, HV))
    x = [t.requires_grad_(wants) for t in (q, k, v, torch.zeros(1, tokens, HV), torch.zeros(1, tokens, HV))]
    return lambda: ds.chunk_gated_delta_rule(*x, ctx, segments=segments, backend="hopper", **options)[0], x


def calls_of(run: Callable[[], Any]) -> int:
    """Functions that are called, of Python and of C: what a host's time goes with, on any machine."""
    seen: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, value: seen.update([event]))
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen["call"] + seen["c_call"]


def test_a_launch_is_what_triton_would_make_of_it(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaspan.kernels.hopper import gluon

    run, _ = rule(300, 3)
    made: dict[bool, list] = {}
    with torch.no_grad():
        for own in (True, False):
            monkeypatch.setattr(gluon, "hooked", lambda own=own: not own)
            run()
            driver.launches.clear()
            run()
            made[own] = [(grid, [shape_of(x) for x in given]) for grid, _, given in driver.launches]
    assert made[True] == made[False] and len(made[True]) == 5


@pytest.mark.parametrize("segments", [1, 3])
def test_a_call_that_is_made_again_launches_what_a_run_launches(
    driver: Any, monkeypatch: pytest.MonkeyPatch, segments: int
) -> None:
    """On the very operands, and on what it has made elsewhere: of two slabs, and from what a checkpoint handed on."""
    run, x = rule(300, segments, True, H=2, HV=2)
    do = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)
    of_user = {
        address: name for name, t in enumerate((*x, do)) for address in range(t.data_ptr(), t.data_ptr() + t.nbytes)
    }

    def place_of(x: Any) -> Any:
        """An argument; of an address, whose it is."""
        if isinstance(x, tuple):  # a descriptor
            return place_of(x[0]), x[1:]
        x = x.data_ptr() if isinstance(x, Tensor) else x
        return (of_user.get(x), x if x in of_user else None) if isinstance(x, int) and x > 2**32 else x

    made, may_repeat = [], again.may_repeat
    for recorded in (True, False):
        monkeypatch.setattr(again, "may_repeat", may_repeat if recorded else lambda *args: False)
        for _ in range(3):
            driver.launches.clear()
            torch.autograd.grad(checkpoint(run, use_reentrant=False), x, do)
        made.append([(grid, [place_of(x) for x in given]) for grid, _, given in driver.launches])
    assert made[0] == made[1] and len(made[0]) == {1: 9, 3: 17}[segments]


def test_who_begins_before_the_launch_before_has_ended(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit states behind maps, and states behind the walk back of each slab; and nobody beside a hook."""
    from deltaspan.kernels.hopper import gluon

    def step(segments: int) -> list[bool]:
        run, x = rule(300, segments, True, H=2, HV=2)
        driver.beside.clear()
        torch.autograd.grad(checkpoint(run, use_reentrant=False).sum(), x)
        return driver.beside[:]

    forward, slab = [False, False, True, False, False], [False, True, False]
    recompute = [*forward[:4], False, False]  # prep, maps, exit states, chain; adjoints of entry states, chain
    assert step(3) == [*forward, *recompute, *slab, *slab]
    assert step(2) == [False] * 3 + [False] * 3 + [*slab, *slab]  # one exit state, and no map to run beside
    monkeypatch.setattr(gluon, "hooked", lambda: True)
    assert not any(step(3))


def test_a_launch_beside_is_told_from_one_that_is_not(driver: Any) -> None:
    from deltaspan.kernels.hopper.gluon import launch
    from deltaspan.kernels.hopper.unit import ROWS, unit_kernel

    given = *(torch.zeros(64, 2, 128, dtype=torch.bfloat16) for _ in range(3)), 128, 32
    told = {"H": 2, "ROWS": ROWS, "GRADIENT": True, "num_warps": 4}
    for beside in (False, True, False):
        launch(unit_kernel, (4,), *given, beside=beside, **told)
    ctx, tier = ds.build_context(ds.partition([0, 64], 1), device="cpu"), select.tier("hopper")
    may = [again.may_repeat(ctx, tier)]
    torch.use_deterministic_algorithms(True)  # and then torch fills what it allocates
    try:
        launch(unit_kernel, (4,), *given, beside=True, **told)
        may.append(again.may_repeat(ctx, tier))
    finally:
        torch.use_deterministic_algorithms(False)
    assert driver.beside == [False, True, False, False] and may == [True, False]


def test_each_walk_of_a_pair_is_divided_as_it_was_planned(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaspan.kernels.hopper import gluon
    from deltaspan.op import segments
    from deltaspan.plan.cost import Pair

    monkeypatch.setattr(segments, "soonest_pair", lambda walks, sm_count: Pair(0, first=0, second=2))
    run, x = rule(300, 3, True, H=2, HV=2)
    seen: list[tuple] = []
    with gluon.watching(lambda ready, grid, given: seen.append((ready.kernel.__name__, grid[0]))):
        torch.autograd.grad(run().sum(), x)
    slab = ("adjoint_kernel", 6), ("forward_kernel", 4), ("gradients_kernel", 1)  # of three walks of a head
    assert seen[-6:] == [*slab, *slab]


def test_no_more_descriptors_are_known_than_so_many(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaspan.kernels.hopper import recording

    monkeypatch.setattr(recording, "MOST_ENCODED", 7)
    ctx = ds.build_context(ds.partition([0, 300], 1), device="cpu")
    held = []  # so that memory is not given out again
    with torch.no_grad():
        for _ in range(5):
            x = [torch.zeros(1, 300, 1, 128, dtype=torch.bfloat16) for _ in range(3)]
            x += [torch.zeros(1, 300, 1) for _ in range(2)]
            held += [x, ds.chunk_gated_delta_rule(*x, ctx, segments=3, backend="hopper")]
    (played,) = (found for found, _ in ctx._cut(ctx._views[0], 1, 3).recordings.values())
    assert 0 < len(played.encoded) <= 7


def test_what_begins_early_is_let_and_waits_itself(driver: Any) -> None:
    from deltaspan.kernels.hopper import gluon

    run, x = rule(300, 3, True, H=2, HV=2)
    seen: list[Any] = []
    with gluon.watching(lambda ready, *given: seen.append(ready)):
        torch.autograd.grad(run().sum(), x)
    code = {ready: ready.compiled.asm["ptx"] for ready in seen}
    pairs = [(before, after) for before, after in pairwise(seen) if after.beside]
    assert [after.kernel.__name__ for _, after in pairs] == ["forward_kernel"] * 3
    for before, after in pairs:
        begun, walks = code[before].partition("griddepcontrol.launch_dependents")[::2]
        assert "mbarrier.init" not in begun and "mbarrier.init" in walks  # before it does anything
        assert "griddepcontrol.wait" in code[after]
    alone = [ready for ready in seen if ready.kernel.__name__ == "forward_kernel" and not ready.beside]
    assert len(alone) == 1 and "griddepcontrol" not in code[alone[0]]  # it reads what the launch before it writes


def shape_of(x: Any) -> Any:
    """An argument but for where memory happens to lie."""
    if isinstance(x, tuple):  # a descriptor
        return x[1:]
    x = x.data_ptr() if isinstance(x, Tensor) else x  # of an empty one, 0
    return "address" if isinstance(x, int) and x > 2**32 else x


def test_a_triton_without_what_is_looked_for_is_asked_as_it_wants(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaspan.kernels.hopper import gluon

    monkeypatch.setattr(gluon, "isfunction", lambda x: False)
    run, _ = rule(300, 3)
    with torch.no_grad():
        run()
    assert len(driver.launches) == 5
    walks = [ready for ready in gluon._READY.values() if ready.kernel.__name__ == "forward_kernel"]
    assert len(walks) == 2 and all(ready.run is None for ready in walks)


def test_addresses_are_those_of_the_tensors(driver: Any) -> None:
    from deltaspan.kernels.hopper.gluon import launch, row_tiles, triton
    from deltaspan.kernels.hopper.unit import ROWS, unit_kernel

    x, dy, y = (torch.zeros(64, 2, 128, dtype=torch.bfloat16) for _ in range(3))
    for given in ((x, dy, y), (y, x, dy)):
        launch(unit_kernel, (4,), *given, 128, 32, H=2, ROWS=ROWS, GRADIENT=True, num_warps=4)
        grid, hooks, passed = driver.launches.pop()
        assert grid == (4, 1, 1) and hooks == (None, None)
        assert passed == (*(t.data_ptr() for t in given), 128, 32, 2, ROWS, True)
    tiled = row_tiles(x)
    assert tiled.passed is None and triton.knobs.runtime.launch_enter_hook is not None


def test_a_forward_encodes_each_of_its_tensors_once(driver: Any) -> None:
    """q, k, v, A and G, and o."""
    run, _ = rule(300, 3)
    with torch.no_grad():
        run()
        driver.encoded.clear()
        run()
    assert len({given[0] for given in driver.encoded}) == len(driver.encoded) == 5 + 1


def test_what_is_recorded_beside_a_hook_is_played_without(driver: Any) -> None:
    import triton

    chain, made = triton.knobs.runtime.launch_exit_hook, []
    with torch.no_grad():
        for recorded_beside in (True, False):
            again_run, _ = rule(300, 3)
            again_run()
            if recorded_beside:
                chain.add(print)
            try:
                again_run()
            finally:
                if recorded_beside:
                    chain.remove(print)
            driver.launches.clear()
            again_run()
            made.append([(grid, [shape_of(x) for x in given]) for grid, _, given in driver.launches])
    assert made[0] == made[1] and len(made[0]) == 5


def test_who_hooks_into_launches_is_called(driver: Any) -> None:
    import triton

    run, _ = rule(300, 3)
    chain = triton.knobs.runtime.launch_exit_hook
    with torch.no_grad():
        run()
        chain.add(print)
        try:
            driver.launches.clear()
            run()
        finally:
            chain.remove(print)
    given = [hooks for _, hooks, _ in driver.launches]
    assert len(given) == 5 and all(leave is chain for _, leave in given)


# By call: functions, some 15 % more than it takes under Triton 3.9. Beside allocations and views nothing goes to torch.
ALLOCATED = "new_empty", "new_empty_strided", "empty"
CALLS: dict[str, tuple[int, bool, int]] = {
    "forward": (1, False, 290),
    "forward in 5": (5, False, 360),
    "step": (1, True, 945),
    "step in 5": (5, True, 1010),
}
VIEWS = "squeeze", "unsqueeze", "unsqueeze_", "transpose", "alias", "detach", "split_with_sizes", "expand", "slice"


@pytest.mark.parametrize("which", CALLS)
def test_a_call_takes_few_steps_of_the_host(driver: Any, which: str) -> None:
    """Who exceeds this has put something in the way of every layer: on a GPU what goes to torch takes 5 to 10 us."""
    segments, wants, most = CALLS[which]
    run, x = rule(320, segments, wants)
    do = torch.zeros(1, 320, 1, 128, dtype=torch.bfloat16)

    def call() -> None:
        with torch.set_grad_enabled(wants):
            o = run()
        if wants:
            torch.autograd.grad(o, x, do)

    for _ in range(3):
        call()
    assert calls_of(call) <= most
    with Asked() as asked:
        call()
    assert set(asked.counts) <= {*ALLOCATED, *VIEWS}
    assert sum(asked.counts[name] for name in ALLOCATED) <= 29


def test_a_checkpointed_step_takes_few_steps_of_the_host(driver: Any) -> None:
    """In two segments and two slabs of heads. Of its calls some 900 are torch's own, most of them for what is saved."""
    run, x = rule(320, 2, True, H=2, HV=2)
    do, saved = torch.zeros(1, 320, 2, 128, dtype=torch.bfloat16), []

    def call() -> None:
        o = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        torch.autograd.grad(o, x, do)

    for _ in range(3):
        call()
    driver.launches.clear()
    assert calls_of(call) <= 2480
    assert len(driver.launches) == 12
    with Asked() as asked:
        call()
    launched = {name: n for name, n in asked.counts.items() if name not in (*ALLOCATED, *VIEWS)}
    assert launched == {"_local_scalar_dense": 1}  # the mark, on the host
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    assert len(saved) == len(x) + 1  # the state that enters the second segment


class Asked(TorchDispatchMode):
    """What goes to torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Living(TorchDispatchMode):
    """The most bytes of new storages that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.add(found) if func.overloadpacket.__name__ in ALLOCATED else found

    def add(self, x: Tensor) -> Tensor:
        self.storages = [held for held in self.storages if not held[0].expired()]
        self.storages.append((StorageWeakRef(x.untyped_storage()), x.nbytes))
        self.most = max(self.most, sum(size for _, size in self.storages))
        return x


def allocated(living: Living, allocate: Callable, *args: Any, **kwargs: Any) -> Tensor:
    return living.add(allocate(*args, **kwargs))


def test_what_is_played_holds_no_more_than_a_run(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slabs the second's states take the place of the first's, and of raw operands what prep made that of what
    it made of ready ones."""
    raw = {"use_qk_l2norm_in_kernel": True}
    for options in ({}, raw):
        run, x = rule(300, 2, True, H=2, HV=2, **options)
        do = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)

        def call(run: Callable = run, x: list = x, do: Tensor = do) -> None:
            torch.autograd.grad(checkpoint(run, use_reentrant=False, preserve_rng_state=False), x, do)

        with Living() as running:
            call()
        for _ in range(3):
            call()
        playing = Living()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_strided", partial(allocated, playing, torch.empty_strided))
            call()
        states = 2 * 5 * 128 * 128 * 2  # of a slab, and adjoints
        assert 2 * states < playing.most <= running.most
