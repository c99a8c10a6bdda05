"""Reading listings: loops, widths of loads, matrix instructions and source lines in all three dialects."""

import pytest

from coursekit.aot.listing import (
    Instruction,
    Listing,
    matrix_instructions,
    spill_instructions,
)
from coursekit.aot.loads import ArgumentLoad, argument_loads
from coursekit.aot.table import marked

SASS = """\
.text.kernel:
	//## File "/x/kernel.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
	//## File "/x/kernel.py", line 9
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
	//## File "/x/kernel.py", line 12
        /*0030*/              @!P1 LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R12, R16, R8 ;
        /*0050*/                   STL.64 [R1], R8 ;
        /*0060*/               @P2 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
"""
PTX = """\
	.loc	1 9 20                          // kernel.py:9:20
	mov.u32 	%r1, %tid.x;
$L__BB0_1:
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, %r6;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r7}, {%r8}, {%r9}, {%r7};
	@%p2 bra 	$L__BB0_1;
	ret;
"""
GCN = """\
	.loc	1 10 16                         ; kernel.py:10:16
.LBB0_2:
	global_load_dwordx4 v[4:7], v[4:5], off
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc1 .LBB0_2
	s_endpgm
"""


def test_hot_loop_is_the_innermost_one_with_most_work() -> None:
    listing = Listing.parse(SASS)
    assert len(listing.loops) == 2  # the jump onto itself behind EXIT is padding, not a loop
    loop = listing.within(listing.hot_loop)
    assert [i.opcode for i in loop] == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "STL.64", "BRA"]
    assert {i.source for i in loop} == {("kernel.py", 12)}
    assert matrix_instructions(loop) == {"HMMA.16816.F32.BF16": 1}
    assert spill_instructions(loop) == 1


def test_an_outer_loop_is_not_hot() -> None:
    inner = "$L__BB0_2:\n\tld.global.b32 {%r1}, [%rd1];\n\tadd.s32 %r1, %r1, 1;\n\tbra $L__BB0_2;\n"
    listing = Listing.parse(f"$L__BB0_1:\n\tld.global.b32 {{%r2}}, [%rd2];\n{inner}\tbra $L__BB0_1;\n")
    assert [i.opcode for i in listing.within(listing.hot_loop)] == ["ld.global.b32", "add.s32", "bra"]


@pytest.mark.parametrize(("text", "widths"), [(SASS, [16]), (PTX, [16, 16]), (GCN, [16])])
def test_each_dialect_gives_loop_and_widths(text: str, widths: list[int]) -> None:
    listing = Listing.parse(text)
    loop = listing.within(listing.hot_loop)
    assert [i.load_bytes for i in loop if i.load_bytes] == widths
    assert sum(matrix_instructions(loop).values()) == 1


@pytest.mark.parametrize(
    ("opcode", "operands", "width"),
    [
        ("LDG.E", "", 4),
        ("LDG.E.64", "", 8),
        ("LDG.E.U16", "", 2),
        ("LDG.E.U8.CONSTANT", "", 1),
        ("LDG.E.128.CONSTANT", "", 16),
        ("LDGSTS.E", "", 4),
        ("LDGSTS.E.BYPASS.LTC128B.128", "", 16),
        ("LDGDEPBAR", "", None),
        ("LDS.128", "", None),
        ("STG.E.128", "", None),
        ("ld.global.b16", "", 2),
        ("ld.global.L1::evict_first.v2.b64", "", 16),
        ("cp.async.ca.shared.global", " [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;", 4),
        ("cp.async.wait_group", " 0;", None),
        ("global_load_dwordx2", "", 8),
        ("buffer_load_ushort", "", 2),
        ("global_load_ubyte", "", 1),
        ("ds_read_b128", "", None),
    ],
)
def test_load_width(opcode: str, operands: str, width: int | None) -> None:
    assert Instruction(0, opcode, operands, None).load_bytes == width


def test_marking_keeps_every_instruction_and_marks_the_loop_only() -> None:
    lines = marked(SASS).splitlines()
    assert sum("/*" in line for line in lines) == 9
    inside = [line for line in lines if line.startswith("┃")]
    assert len(inside) == 5 and inside[0].split()[1] == ".L_x_2:" and inside[-1].endswith("kernel.py:12")
    assert "4 of 9 instructions" in lines[0] and "1 of 16 B" in lines[1] and "1 HMMA" in lines[2]
    assert max(map(len, marked(PTX).splitlines())) <= 100
    assert marked("\tret;\n").startswith("no loop")


TTGIR = """\
#loc = loc("/x/kernel.py":3:0)
  tt.func public @k(%a: !tt.ptr<f16> loc("a"(#loc)), %n: i32, %t: !tt.ptr<i32> loc("t"(#loc))) {
    %k = tt.splat %a : !tt.ptr<f16> -> tensor<8x8x!tt.ptr<f16>, #b> loc(#loc4)
    %buf = ttg.local_alloc : () -> !ttg.memdesc<3x8x8xf16, #s, #smem, mutable> loc(#loc4)
    %row = tt.load %t : !tt.ptr<i32> loc(#loc2)
    %r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%p = %k, %s = %row) -> (tensor<8x8x!tt.ptr<f16>, #b>) {
      %q = tt.addptr %p, %off : tensor<8x8x!tt.ptr<f16>, #b>, tensor<8x8xi32, #b> loc(#loc4)
      %slot = ttg.memdesc_index %buf[%i] : !ttg.memdesc<3x8x8xf16, #s> -> !ttg.memdesc<8x8xf16, #s> loc(#loc4)
      %c = ttg.async_copy_global_to_local %q, %slot mask %m other %z : tensor<8x8x!tt.ptr<f16>, #b> loc(#loc4)
      %z2 = tt.load %q, %m : tensor<8x8x!tt.ptr<f16>, #b> loc(#loc5)
    }
#loc1 = loc("/x/helper.py":19:20)
#loc2 = loc("/x/kernel.py":8:1)
#loc3 = loc(callsite(#loc1 at #loc2))
#loc4 = loc("k"(#loc3))
#loc5 = loc("/x/kernel.py":9:1)
"""


def test_loads_are_traced_to_the_argument_through_loops_and_inlined_calls() -> None:
    assert argument_loads(TTGIR, ["a", "n", "t"]) == [
        ArgumentLoad("t", ("kernel.py", 8), 0),
        ArgumentLoad("a", ("helper.py", 19), 3),
        ArgumentLoad("a", ("kernel.py", 9), 0),
    ]


def test_arguments_that_do_not_match_the_code_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        argument_loads(TTGIR, ["a", "n"])
