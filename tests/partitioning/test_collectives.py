"""Collectives are read off HLO with their bytes, groups and the loops around them."""

from t0repro.partitioning.collectives import collectives, counts

HLO = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body.1 (state: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %ar = (f32[16,4]{1,0}, bf16[8]{0}) all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
}

%cond.1 (state: (s32[], f32[16,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = s32[] while(%i), condition=%cond.1, body=%body.1, c={"known_trip_count":{"n":"3"}}
  %ag = (f32[8]{0}, f32[32]{0}) all-gather-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %out = f32[8]{0} copy(%p)
}
"""


def test_bytes_groups_and_loops():
    reduced, gathered = sorted(collectives(HLO), key=lambda item: item.kind, reverse=True)
    assert (reduced.kind, reduced.result, reduced.group) == ("all-reduce", 16 * 4 * 4 + 16, 2)
    assert reduced.in_loop and reduced.times == 3
    assert reduced.sent == 3 * 272  # twice half of it, three times
    assert (gathered.kind, gathered.result, gathered.group) == ("all-gather", 32 * 4, 4)
    assert not gathered.in_loop and gathered.sent == 96


def test_a_tpus_loop_runs_until_its_counter_is_at_the_limit():
    without = HLO.replace(', c={"known_trip_count":{"n":"3"}}', "")
    assert [item.times for item in collectives(without) if item.in_loop] == [1]
    limit = without.replace("ROOT %less", "%n = s32[]{:T(256)} constant(5)\n  ROOT %less")
    assert [item.times for item in collectives(limit) if item.in_loop] == [5]


def test_counts_keep_loops_apart():
    assert counts(collectives(HLO)) == {"all-gather": 1, "all-reduce in loop": 1}


def test_a_tpus_reduce_scatter_is_a_fused_all_reduce():
    # As libtpu writes it for v3, with layouts and the add left out.
    fused = """%all-reduce-scatter.5.clone.1 (input.3: bf16[64,128]) -> bf16[16,128] {
  %all-reduce.7 = bf16[64,128] all-reduce(%input.3), replica_groups={{0,2,4,6},{1,3,5,7}}
  ROOT %part = bf16[16,128] dynamic-slice(%all-reduce.7, %at, %zero)
}

ENTRY %main (p: bf16[64,128]) -> bf16[16,128] {
  ROOT %fusion.1 = bf16[16,128] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.5.clone.1
}
"""
    (scattered,) = collectives(fused)
    assert (scattered.kind, scattered.group) == ("reduce-scatter", 4)
    assert scattered.result == 16 * 128 * 2 and scattered.sent == 3 * scattered.result


def test_groups_may_be_axes_of_a_mesh():
    # As libtpu writes them for v5p: a gather is an all-reduce of parts put into zeros.
    gathered = """ENTRY %main (p: bf16[32,128]) -> bf16[2048,128] {
  ROOT %g = bf16[2048,128] all-reduce(%x), replica_groups=mesh['axis_0'=64,'axis_1'=2] {'axis_0'}
}
"""
    (reduced,) = collectives(gathered)
    assert (reduced.kind, reduced.group) == ("all-reduce", 64)
    assert reduced.sent == 2 * 63 * 32 * 128 * 2
    both, part = ("{'axis_0','axis_1'}", 128), ("{'axis_0':(1)4,'axis_1'}", 8)
    for taken, size in (both, part):
        (found,) = collectives(gathered.replace("{'axis_0'}", taken))
        assert found.group == size
