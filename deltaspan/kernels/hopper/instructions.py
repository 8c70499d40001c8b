"""What kernels ask for by the instruction, where the compiler would take more of them, round differently, or keep a
number in registers that is not wanted there. Elementwise; two bf16 numbers lie in one register."""

from deltaspan.kernels.hopper.gluon import gl, gluon


@gluon.jit
def exp2(x):
    """2^x in fp32, where the library's own leaves a branch for every element."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def let_next_begin():
    """A launch behind this one that may run beside it begins as soon as every program has come here, or ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Until the launch before this one, beside which it may run, has ended and all that it wrote is seen: so that who
    waits for this one has waited for both."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def reciprocal(x):
    """1 / x in fp32 to a unit of the last place, in one instruction; zero where it would be subnormal."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def rounded_sum(x, y):
    """x + y in fp32, of a product that is rounded before: not in one operation with it."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], gl.float32, is_pure=True, pack=1)


@gluon.jit
def narrowed(x):
    """x in bf16, and not in fp32 beside it: the compiler would keep both in registers."""
    x = x.to(gl.bfloat16)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def late(index):
    """Itself, by way of the assembler, so that no address made of it is kept in registers all along a walk."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """An integer that all threads of a warp have alike, so that the compiler knows it: what depends on it, such as a
    loop's index and the descriptors of products, then lies in registers of the warp, and not in some of each thread."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def widened(x):
    """x of bf16 in fp32, two numbers by two instructions: the compiler would take a third to part them."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def in_fp16(x):
    """x of fp32 in fp16, two numbers by one instruction: the compiler may take each by itself and join them."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2)


@gluon.jit
def mask(kept):
    """All bits of a bf16 number, or none."""
    return gl.where(kept, -1, 0).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def masked(x, mask):
    """x in bf16 where the mask has all bits, zero where it has none: one instruction for two numbers, where choosing
    takes one for each, and more to part and join them."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def masked_or(x, mask, other):
    """The same, with the bits of `other` added, which has none where the mask has."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2; or.b32 $0, $0, $3;", "=&r,r,r,r", [x, mask, other], gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def masked_negative(x, mask):
    """-x in the same way, still by one instruction."""
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $1, 0x80008000; and.b32 $0, $0, $2;", "=&r,r,r", [x, mask], gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def two_products(a, b, c, d):
    """a b + c d in bf16, rounded twice: two instructions for two numbers."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2; fma.rn.bf16x2 $0, $3, $4, $0;", "=&r,r,r,r,r", [a, b, c, d], gl.bfloat16,
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def scaled(x, by):
    """x in bf16 times what is in fp32, rounded once or as good as: two instructions for two numbers. `by` comes in two
    bf16 parts, and what the smaller one adds is rounded to 2^-9 of 2^-9."""
    high = by.to(gl.bfloat16)
    low = (by - high.to(gl.float32)).to(gl.bfloat16)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $3; fma.rn.bf16x2 $0, $1, $2, $0;", "=&r,r,r,r", [x, high, low], gl.bfloat16,
        is_pure=True, pack=2,
    )  # fmt: skip
