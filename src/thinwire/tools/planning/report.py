"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.tools.bench.results import significant
from thinwire.tools.planning.crossing import DENSE, Crossings
from thinwire.tools.planning.model import GPUS, Link, Model
from thinwire.tools.planning.plan import FittedModel, Planned, Request


def describe(planned: Planned, gpu: str | None = None) -> str:
    """Memory, with its share of a card's, and the bytes of each leg."""
    request, memory, of_round = planned.request, planned.memory, planned.round_memory
    hosts = f" on {request.hosts} hosts" if request.hosts > 1 else ""
    exact = ", to the byte" if of_round is None else ""
    lines = [
        f"{request.ranks} ranks{hosts}, {request.experts} experts, top-{request.top_k}, hidden {request.hidden}, "
        f"{request.max_tokens} tokens a rank, {str(request.dtype).removeprefix('torch.')}",
        "",
        f"memory of rank 0{exact} ({memory.transport}: {memory.reason})",
    ]
    if of_round is None:
        sizes = {
            f"symmetric, {request.heap} heap": memory.symmetric_bytes,
            "bookkeeping": memory.bookkeeping_bytes,
            "added with gradients": memory.backward_bytes,
            "all, without and": memory.forward_bytes,
            "with gradients": memory.training_bytes,
        }
    else:
        sizes = {
            "held between rounds": 0,
            "messages, uniform": of_round.uniform_bytes,
            "messages, at most": of_round.most_bytes,
            "at most with gradients": of_round.training_bytes,
        }
    lines += [f"  {name:24} {size:>16,} bytes  {size / 2**20:>10.1f} MiB" for name, size in sizes.items()]
    if of_round is not None:
        lines.append("  uniform: with uniform routing; at most: all ranks' tokens come to this rank")
    if gpu is not None:
        card = GPUS[gpu]
        shares = [f"{significant(size / card.memory_gb / 1e7, 2)} %" for size in planned.held_bytes]
        lines.append(f"  {shares[0]} of the {card.memory_gb} GB of {gpu}; with gradients {shares[1]}")
    lines += [
        "",
        f"bytes of the busiest rank, uniform routing: a token goes to {planned.fan_out:.3f} ranks, its own included"
        + ", and each of its experts sends a row back" * planned.request.invariant,
        "  leg       wire     bytes a record   rows sent  rows that stay      MB sent   MB as none   saved",
    ]
    for leg, plain in zip(planned.legs, planned.plain, strict=True):
        saved = plain.wire_bytes / leg.wire_bytes if leg.wire_bytes else 1.0
        lines.append(
            f"  {leg.name:9} {leg.wire:9}{leg.record_bytes:>14,}{leg.rows:>12,.0f}{leg.own_rows:>16,.0f}"
            f"{leg.wire_bytes / 1e6:>13,.2f}{plain.wire_bytes / 1e6:>13,.2f}{saved:>7.2f}x"
        )
    return "\n".join(lines)


def describe_hosts(found: Crossings, request: Request) -> str:
    """Describes what crosses between hosts, leg by leg, and how evenly."""
    lines = [
        f"{request.hosts} x {request.ranks // request.hosts} ranks, {found.routing} routing, {found.tokens:,} tokens "
        f"counted: a token goes to {found.ranks:.3f} ranks, {found.hosts:.3f} hosts",
        f"  rows of a rank's experts at most: {found.imbalance:.2f} x the mean (contiguous: {found.contiguous:.2f} x)",
        "  leg      wire     level        bytes each  bytes a token  MB a rank  most sent  received  imbalance  within",
    ]
    for leg in found.legs:
        mean, *most = (f"{size / 1e6:.2f}" for size in (leg.token_bytes * request.max_tokens, leg.sent, leg.received))
        lines.append(
            f"  {leg.name:9}{leg.wire:9}{leg.level:11}{leg.message_bytes:>12,}{leg.token_bytes:>15,.0f}{mean:>11}"
            f"{most[0]:>11}{most[1]:>10}{leg.imbalance:>11.2f}{leg.within / 1e6:>8,.0f}"
        )
    dense = f"{found.host_share:.4f} of tokens go to a host; dense, all tokens to all hosts, from {DENSE} on"
    return "\n".join(lines + [f"  two levels would send {found.form} messages: {dense}"] * (request.hosts > 1))


def describe_times(planned: Planned, model: Model | FittedModel) -> str:
    """Predicted times, with the model's terms and assumptions."""
    if isinstance(model, FittedModel):
        taken = f"{model.source} ({model.ranks} ranks, {model.hosts} hosts)"
        lines = [f"time, predicted from {taken}: alpha + bytes / beta"]
        if (model.ranks, model.hosts) != (planned.request.ranks, planned.request.hosts):
            lines.append("  measured on another number of ranks or hosts than is planned: expect it to be off")
        for leg in planned.legs:
            fit = model.links[leg.name, leg.wire]
            reached = f"alpha {1e6 * fit.alpha:.1f} us, beta {fit.beta / 1e9:.3f} GB/s"
            lines.append(f"  {leg.name} {leg.wire}: {reached} ({fit.source})")
    else:
        lines = ["time, predicted and not measured: alpha + bytes / (beta x efficiency)", _link("link", model.within)]
        if model.between is not None:
            lines += [
                _link("link between hosts", model.between),
                "  both levels work at once: the slower one counts; a token crosses once for each rank of another host",
            ]
        lines.append("  assumed: uniform routing, all ranks at once, kernels hidden behind the link, no other traffic")
    for leg, plain, *seconds in zip(planned.legs, planned.plain, planned.seconds[:2], planned.seconds[2:], strict=True):
        own, plainly = ("-" if taken is None else f"{1e6 * taken:.1f} us" for taken in seconds)
        lines.append(f"  {leg.name:9}{own:>13}   as {plain.wire}{plainly:>13}")
    return "\n".join(lines)


def _link(name: str, link: Link) -> str:
    reached = f"beta {link.beta / 1e9:g} GB/s, efficiency {link.efficiency:g}"
    return f"  {name}: alpha {1e6 * link.alpha:g} us, {reached} ({link.source})"


def describe_sweep(plans: Sequence[Planned]) -> str:
    """A line for each number of ranks."""
    lines = [
        "  ranks  hosts  transport  fan-out  MiB most  dispatch MB  combine MB  dispatch us  combine us  both, none us"
    ]
    for planned in plans:
        dispatch, combine = planned.legs
        times = ["-" if seconds is None else f"{1e6 * seconds:.1f}" for seconds in planned.seconds]
        none = planned.seconds[2:]
        both = "-" if None in none else f"{1e6 * sum(seconds or 0.0 for seconds in none):.1f}"
        lines.append(
            f"{planned.request.ranks:>7}{planned.request.hosts:>7}{planned.memory.transport:>11}{planned.fan_out:>9.3f}"
            f"{planned.held_bytes[0] / 2**20:>10.1f}{dispatch.wire_bytes / 1e6:>13.2f}"
            f"{combine.wire_bytes / 1e6:>12.2f}{times[0]:>13}{times[1]:>12}{both:>15}"
        )
    return "\n".join(lines)
