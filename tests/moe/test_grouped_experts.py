"""Experts on torch's grouped product: chosen with a reason, equal to the loop, and without a wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.moe import grouped_mm
from thinwire.moe.experts import ClampedSwiGLU, GroupedExperts

COUNTS = torch.tensor([3, 0, 7, 1, 0])
VARIANTS = {
    "plain": {"activation": "gelu"},
    "gated": {"gated": True},
    "biases": {"gated": True, "bias": True, "activation": ClampedSwiGLU()},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_experts(
    variant: str, dtype: torch.dtype = torch.float32, hidden: int = 24, ff: int = 64, device: str = "cpu"
) -> GroupedExperts:
    experts = GroupedExperts(5, hidden, ff, **VARIANTS[variant], dtype=dtype, device=device)
    for name, parameter in experts.named_parameters():
        if name.startswith("b_"):
            torch.nn.init.normal_(parameter)
    return experts


def results(
    experts: GroupedExperts,
    tokens: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
    expand: bool = False,
) -> list[torch.Tensor]:
    """The output and all gradients."""
    tokens = tokens.detach().clone().requires_grad_()
    out = function(tokens)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32).to(out.dtype)
    grads = torch.autograd.grad(
        out, [tokens, *experts.parameters()], torch.ones(()).expand_as(out) if expand else upstream
    )
    return [out.detach(), *grads]


def looped(experts: GroupedExperts, tokens: torch.Tensor, counts: torch.Tensor, *offsets: torch.Tensor) -> torch.Tensor:
    return experts._loop(tokens, *experts._segments(len(tokens), counts, *(offsets or (None,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_grouped_product_on_the_cpu_equals_the_loop_to_the_last_bit(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, tokens = make_experts(variant, dtype), torch.randn(11, 24).to(dtype)
    assert experts.explain(tokens, COUNTS).startswith("experts: grouped_mm")
    got = results(experts, tokens, lambda rows: experts(rows, COUNTS))
    want = results(experts, tokens, lambda rows: looped(experts, rows, COUNTS))
    assert torch.equal(got[0], want[0])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "offsets", [None, [0, 4, 4, 12, 16, 16], [2, 8, 8, 16, 17, 19]], ids=["packed", "aligned", "gaps"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_runs_on_a_gpu_equals_the_loop_and_leaves_padding_zero(variant: str, offsets: list[int] | None) -> None:
    torch.manual_seed(1)
    experts = make_experts(variant)
    bounds = [0, 3, 3, 10, 11, 11] if offsets is None else offsets
    tokens = torch.full((bounds[-1] + (0 if offsets is None else 3), 24), torch.nan)
    for start, count in zip(bounds, COUNTS.tolist(), strict=False):
        tokens[start : start + count] = torch.randn(count, 24)
    where = [] if offsets is None else [torch.tensor(offsets)]
    got = results(experts, tokens, lambda rows: experts._grouped_on_device(rows, COUNTS, *(where or [None])))
    want = results(experts, tokens, lambda rows: looped(experts, rows, COUNTS, *where))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    padding = tokens.isnan().any(1)
    assert not got[0][padding].any() and not got[1][padding].any()
    with torch.no_grad(), torch.profiler.profile() as profile:
        got = [experts._grouped_on_device(tokens, COUNTS, *(where or [None]))]
    torch.testing.assert_close(got[0][~padding], want[0][~padding], rtol=1e-5, atol=1e-6)
    # Worst-case capacities are many times what came: each pass over them takes longer than the products.
    assert "aten::where" not in {event.name for event in profile.events()}


def test_an_expanded_gradient_and_unaligned_rows_are_taken() -> None:
    experts = make_experts("gated")
    wide = torch.randn(11, 25)
    got = results(experts, wide, lambda rows: experts(rows[:, 1:], COUNTS), expand=True)
    want = results(experts, wide, lambda rows: looped(experts, rows[:, 1:], COUNTS), expand=True)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts,offsets", [([90, -5, 3, 2**40, 1], None), ([2, 2, 2, 2, 2], [9, 3, -7, 2**50, 4, 1])])
def test_counts_that_nobody_can_look_at_touch_no_memory_but_the_rows(
    counts: list[int], offsets: list[int] | None
) -> None:
    given = 11, torch.tensor(counts), None if offsets is None else torch.tensor(offsets)
    ends = grouped_mm.ends_of_experts(*given)
    is_row = grouped_mm.rows_of_experts(*given, ends)
    assert ends.dtype == torch.int32 and ends.tolist() == sorted(ends.tolist()) and 0 <= ends[0] and ends[-1] <= 11
    assert is_row.shape == (11,)


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_a_gpu_with_kernels_nothing_is_read_by_the_host(variant: str) -> None:
    """Tensors without memory stand for those of a GPU: what reads one of them raises."""
    experts = make_experts(variant, torch.bfloat16, device="meta")
    tokens = torch.empty(11, 24, dtype=torch.bfloat16, device="meta", requires_grad=True)
    counts, offsets = (torch.empty(size, dtype=torch.int64, device="meta") for size in (5, 6))
    with mock.patch.object(grouped_mm, "why_not", return_value=None):
        out = experts(tokens, counts, offsets)
    torch.autograd.grad(out, [tokens, *experts.parameters()], torch.empty_like(out))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        experts(tokens, counts, offsets)  # the loop reads them


@pytest.mark.exhaustive
def test_compiled_experts_equal_eager_ones() -> None:
    experts = make_experts("gated")
    compiled = torch.compile(experts, backend="aot_eager")
    for counts in (COUNTS, COUNTS + 1):
        tokens = torch.randn(int(counts.sum()), 24)
        got = results(experts, tokens, lambda rows, counts=counts: compiled(rows, counts))
        want = results(experts, tokens, lambda rows, counts=counts: experts(rows, counts))
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_reason_for_a_loop_is_told() -> None:
    def reason(experts: GroupedExperts, counts: torch.Tensor = COUNTS, *offsets: torch.Tensor, rows: int = 11) -> str:
        tokens = torch.zeros(rows, experts.hidden_size, dtype=experts.w_in.dtype)
        return experts.explain(tokens, counts, *offsets)

    assert "not torch.float64" in reason(make_experts("gated", torch.float64))
    assert "multiples of 16 bytes" in reason(make_experts("gated", hidden=6))
    assert "where they lie" in reason(make_experts("gated", ff=24))
    assert "one expert" in reason(GroupedExperts(1, 24, 64), torch.tensor([11]))
    assert "padding rows" in reason(make_experts("gated"), COUNTS, torch.tensor([0, 4, 4, 12, 16, 16]), rows=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in reason(make_experts("gated"))
    with mock.patch.object(grouped_mm, "F", object()):
        assert "has no grouped_mm" in reason(make_experts("gated"))
    # Fake tensors of GPUs that are not there; each row is a capability and a dtype.
    for capability, dtype, wanted in (
        ((8, 0), "bfloat16", "8.0"),
        ((9, 0), "float16", "float16"),
        ((9, 0), "bfloat16", None),
    ):
        with FakeTensorMode(), mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            experts = make_experts("gated", getattr(torch, dtype), device="cuda:0")
            tokens = torch.empty(11, 24, dtype=experts.w_in.dtype, device="cuda:0")
            counts = torch.empty(5, dtype=torch.int64, device="cuda:0")
            why_not = grouped_mm.why_not(tokens, (experts.w_in, experts.w_out), counts)
            assert why_not is None if wanted is None else wanted in str(why_not)
            on_host = grouped_mm.why_not(tokens, (experts.w_in,), torch.empty(5, dtype=torch.int64))
            assert "on the host already" in str(on_host)


def test_a_float16_layer_under_autocast_of_bfloat16_computes() -> None:
    """Autocast has no dtype for torch.cat of the two, and torch's own rules have."""
    experts = make_experts("gated", torch.float16)
    tokens = torch.randn(11, experts.hidden_size).half()
    want = experts(tokens, COUNTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = experts(tokens, COUNTS)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05, check_dtype=False)
