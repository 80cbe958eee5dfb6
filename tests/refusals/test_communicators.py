"""Communicators, layouts, messages, wire formats, launchers and tools refuse bad input. A refusal is one row."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.comm.test_bootstrap import MEETING, OPEN_MPI, SLURM, TORCHRUN
from tests.comm.test_rank_table import DEVICE, ONE_SERVER, TWO_SERVERS, change
from tests.helpers.refusals import Ground, Row, answers, check, expand
from thinwire.comm import Communicator, RankTable, discover
from thinwire.comm.agreement.standby import resolve_quorum
from thinwire.comm.launch.launchers import _RANKS_ALONE
from thinwire.comm.layout import as_tensor_layout, plan_redistribute
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import (
    ArgumentError,
    CountsError,
    LayoutError,
    RankTableError,
    ThinwireError,
    TransportUnavailable,
    WireFormatError,
)
from thinwire.fields import MOST_BYTES, OneOf, decode, encode
from thinwire.moe.memory import plan_memory
from thinwire.testing import run_ranks
from thinwire.tools.bench.options import Routing, Settings
from thinwire.tools.bench.traffic import expert_ids, row_counts
from thinwire.tools.doctor.finding import Finding


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 4)


def freed() -> torch.Tensor:
    x = torch.zeros(4, 4)
    x.untyped_storage().resize_(0)
    return x


#: Tensors that cannot be filled, what the error says, and whether collectives say so too: others are not contiguous.
UNFILLABLE = (
    ("made_in_inference_mode()", "was made in inference mode ... clone", True),
    ("made_in_inference_mode()[:]", "was made in inference mode", True),
    ("torch.zeros(4, 1).expand(4, 4)", "elements share memory", False),
    ("torch.zeros(7).as_strided((4, 4), (1, 1))", "elements share memory", False),
    ("freed()", "has no memory", True),
    ("torch._efficientzerotensor(4, 4)", "has no memory", True),
)
#: Calls that fill them, and the parameter.
FILLING = (
    ("comm.all_reduce({}", "tensor"), ("comm.reduce({}, rank", "tensor"), ("comm.broadcast({}, 1 - rank", "tensor"),
    ("comm.scatter({}, [x4, x4] if rank == 0 else None", "tensor"), ("comm.reduce_scatter({}, [x4, x4]", "output"),
    ("comm.all_to_all_v({}, x4", "output"), ("comm.all_gather([x4.clone(), {}], x4", "tensor_list"),
    ("comm.gather(x4, [x4.clone(), {}], dst=rank", "gather_list"),
    ("comm.all_to_all([x4.clone(), {}], [x4, x4]", "output_tensor_list"),
)  # fmt: skip
NO_RANKS = "expected None or ranks of this communicator, ints from 0 to 1"

#: x is float32 [4] on two ranks, x4 [4, 4], and `lists` has zeros like x for each rank; `byte` makes eight bytes.
ROWS = expand(
    ("comm.all_reduce([1.0])", ArgumentError, "tensor is a list; a torch.Tensor is needed"),
    ("comm.all_reduce(x, 'median')", ArgumentError, "op is 'median', expected one of sum, prod, min, max, avg"),
    ("comm.all_reduce(x, dist.ReduceOp.BOR)", ArgumentError, "expected one of sum"),
    ("comm.all_reduce(x.int(), 'avg')", ArgumentError, "op 'avg' does not take torch.int32; it takes float16"),
    ("comm.all_reduce(x.to(_), 'max')", ArgumentError, "does not take _", "torch.complex64", "torch.float8_e4m3fn"),
    ("comm.all_reduce(x.to('meta'))", ArgumentError, "tensor lives on meta"),
    ("comm.all_reduce(x.to_sparse())", ArgumentError, "torch.sparse_coo"),
    ("comm.broadcast(x.to(torch.complex64).conj(), 0)", ArgumentError, "pass resolve_conj()"),
    ("comm.broadcast(x, _)", ArgumentError, "src is _", "-1", "'0'"),
    ("comm.reduce(x, 2)", ArgumentError, "dst is 2, expected a rank ... from 0 to 1"),
    ("comm.reduce(x, True)", ArgumentError, "dst is True"),
    ("comm.all_gather(lists[1:], x)", CountsError, "tensor_list has 1 tensors, expected one for each of the 2"),
    ("comm.all_gather(torch.zeros(2, 4), x)", ArgumentError, "tensor_list is a Tensor, expected a list of 2"),
    ("comm.all_gather(lists, x[:3])", CountsError, "tensor_list[0] has shape (4,), expected tensor's, (3,)"),
    ("comm.all_gather(lists, x.int())", ArgumentError, "tensor_list[0] is torch.float32, but tensor is ... int32"),
    ("comm.gather(x, lists if rank else None, 0)", ArgumentError, "gather_list is ... expected a list on rank"),
    ("comm.scatter(x, None if rank else lists, 1)", ArgumentError, "scatter_list is ... on rank"),
    ("comm.reduce_scatter(x, lists[1:])", CountsError, "input_list has 1 tensors"),
    ("comm.reduce_scatter(x[:2], lists)", CountsError, "input_list[ ... ] has shape (4,), expected output's"),
    ("comm.all_to_all(lists, lists[:1])", CountsError, "input_tensor_list has 1 tensors"),
    ("comm.all_to_all(lists, [x[:1], x[:1]])", CountsError, "sends to itself"),
    ("comm.all_to_all_v(x[:3], x)", CountsError, "output has 3 rows, which 2 ranks cannot share equally"),
    ("comm.all_to_all_v(x, x, None, [1, 2])", CountsError, "input_split_sizes is ... 3 rows ... but input has 4"),
    ("comm.all_to_all_v(x, x, [4], None)", CountsError, "output_split_sizes is [4], expected 2 ints"),
    ("comm.all_to_all_v(x, x, None, [-1, 5])", CountsError, "input_split_sizes[0] is -1"),
    ("comm.all_to_all_v(x[0], x)", CountsError, "output has no dimensions"),
    ("comm.all_to_all_v(x.view(4, 1), x)", CountsError, "output has rows of shape (1,), but input has ()"),
    ("comm.all_to_all_v(x.int(), x)", ArgumentError, "output is torch.int32, but input is torch.float32"),
    ("comm.all_to_all_v(x, x, [3, 1], [1, 3])", CountsError, "output_split_sizes"),
    ("with comm.call('another call', numbered=False): in_thread(lambda: comm.all_reduce(x))", ThinwireError,
     "is in another call on ... from one thread at a time"),
    ("closed._", ThinwireError, "closed", "all_reduce(x)", "shrink()"),
    *(
        (f"{call.format(odd)}, async_op={later})", ArgumentError, f"{name} ... {told}")
        for odd, told, _ in UNFILLABLE for call, name in FILLING for later in (False, True)
    ),
    *(
        (f"tw.{name}(x4, out={odd}, wire='none', transport={path!r}, comm=comm)", ArgumentError, f"out {told}")
        for odd, told, everywhere in UNFILLABLE if everywhere
        for name in ("all_reduce", "all_to_all_v") for path in ("direct", "staged")
    ),
    # messages, counts, settings
    ("comm.post([byte()], [None] * 2)", ThinwireError, "sends has 1 entries, expected one for each of the 2 ranks"),
    ("comm.post([None] * 2, [byte(), byte()])", ThinwireError, "] is this rank's own entry"),
    ("comm.post(peer(torch.zeros(8)), [None] * 2)", ThinwireError, "contiguous torch.float32, expected contiguous"),
    ("comm.post([None] * 2, peer(byte()[::2]))", ThinwireError, "is strided torch.uint8"),
    ("comm.post(peer(byte().to('meta')), [None] * 2)", TransportUnavailable, "lives on meta, but ... cpu memory only"),
    ("comm.exchange_counts([1])", CountsError, "has 1 entries"),
    ("comm.exchange_counts([1, -1])", CountsError, "[1] is -1"),
    ("comm.exchange_counts([True, 1])", CountsError, "True"),
    ("comm.exchange_counts([0, 2**63])", CountsError, "9223"),
    ("comm.check_device('the routing', x.to('meta'))", ArgumentError, "the routing lives on meta, but ... live on cpu"),
    ("comm.require_same('x', {'dtype': torch.float32})", ArgumentError, "'dtype' is torch.float32"),
    ("comm.require_same('x', {3: 1})", ArgumentError, "setting 3 is 1, expected a str as its name"),
    ("comm.require_same('x', _)", ArgumentError, "expected a dict", "3", "'dp'", "[1.0]", "x"),
    ("comm.all_gather_data('7', int)", TypeError, "'7' cannot be sent to peers as int"),
    ("comm._", ThinwireError, f"at most {MOST_BYTES} can be sent",
     "all_gather_data('x' * MOST, str)", "require_same('a thing', {'text': 'x' * MOST})"),
    ("encode(_)", TypeError, "cannot be sent to peers as", "1, str", "True, int", "1, bool", "1.0, int", "2**63, int",
     "2**63, float", "float('nan'), float", "float('inf'), float", "b'bytes', str", "{1: 2}, {str: int}",
     "[1, 'a'], [int]", "[1], (int, int)", "{'a': 1}, [int]", "[1], {str: int}", "tw, str", "None, OneOf(int, [int])"),
    ("decode(_, int)", ThinwireError, "rank 3 ... not JSON", "pickle.dumps(print)", "b''", "b'[1'", "b'1 2'",
     "bytes((34, 255, 34))", "'\"abc\"'.encode('utf-16')", "b'[' * 200_000"),
    ("decode(str(2**63).encode(), int)", ThinwireError, "rank 3 sent 9223372036854775808, expected int"),
    ("decode(_, int)", ThinwireError, "rank 3 sent ... expected int", "b'true'", "b'\"1\"'"),
    ("decode(b'_', float)", ThinwireError, "rank 3 sent ... expected float", "Infinity", "NaN"),
    ("decode(b'_', (int, int))", ThinwireError, "sent [1 ... expected (int, int)", "[1]", "[1,2,3]"),
    ("decode(b'{\"a\":1}', {str: str})", ThinwireError, "rank 3 ... expected {str: str}"),
    ("decode(b'[1]', [str | None])", ThinwireError, "rank 3 ... expected [str | None]"),
    ("decode(b'[1,2]', OneOf((str, str), (int,)))", ThinwireError, "rank 3 ... expected (str, str) or (int,)"),
    # other ranks
    ("comm.shrink(_)", ArgumentError, NO_RANKS, "[2]", "[-1]", "[True]", "['1']", "1", "'1'", "[1.0]"),
    ("comm.shrink(lost=range(2))", ThinwireError, "of 2 is itself one of the ranks that are lost"),
    ("resolve_quorum('half')", ArgumentError, "quorum is 'half', expected None, 'any' or 'majority'"),
    ("comm.split()", LayoutError, "takes a layout and axes, or groups"),
    ("comm.split(PAIR, 'ep', groups=[[0, 1]])", LayoutError, "pass one of these"),
    ("comm.split(CUBE, 'mp')", LayoutError, "for 8 ranks, but the communicator has 2"),
    ("comm.split(PAIR, 'tp')", LayoutError, "'tp' is no axis"),
    ("comm.split(groups=[[0], [0]])", LayoutError, "do not hold each of ranks 0 to 1 once"),
    ("comm.split(groups=[[0], [0, 1]])", LayoutError, "do not hold each"),
    ("comm.split(_, 'dp')", LayoutError, "", "3", "'dp'", "[1.0]", "x", "None"),
    ("comm.split(groups=_)", LayoutError, "groups is ... lists of ranks, ints from 0 to 1", "3", "'dp'", "[1.0]", "x"),
    ("comm.split(groups=[_])", LayoutError, "lists", "3", "'dp'", "[1.0]", "x", "None", "[True]", "[0.0]", "['0']"),
    ("tw.init(domain=_)", ThinwireError, "domain is ... expected None or a name", "''", "' '", "3"),
    ("Communicator.of_threads(ThreadWorld(1), timeout=0)", ThinwireError, "timeout is 0"),
    ("Communicator.of_threads(ThreadWorld(1), device='meta')", ThinwireError, "threads cannot exchange"),
    ("run_ranks(print, _)", ThinwireError, "world_size is 0, expected", "0", "0, mode='thread'"),
    ("run_ranks(print, 1, device='tpu')", ThinwireError, "device is 'tpu', expected"),
    ("run_ranks(print, 1, mode='fibre')", ThinwireError, "mode is 'fibre', expected"),
    ("run_ranks(print, 1, mode='thread', env={})", ThinwireError, "env is {}, but threads share this process's"),
    ("run_ranks(print, 1, timeout=0.0)", ThinwireError, "timeout is 0.0, expected"),
    ("run_ranks(print, 1, timeout=float('inf'))", ThinwireError, "timeout is inf, expected"),
    # launchers: `table` discovers with a rank table of four ranks, `one`, `two` and `device` change what is in one
    ("discover({'RANK': '0'})", ThinwireError, "WORLD_SIZE is not set"),
    ("discover({'WORLD_SIZE': '2'})", ThinwireError, "RANK is not set"),
    ("discover({'OMPI_COMM_WORLD_SIZE': '2'})", ThinwireError, "OMPI_COMM_WORLD_RANK is not set"),
    ("discover({'SLURM_PROCID': '0'})", ThinwireError, "SLURM_NTASKS is not set"),
    ("discover({'PMI_RANK': '0'})", ThinwireError, "PMI_SIZE is not set"),
    ("discover({'_': '1'})", ThinwireError, "_ is '1' ... one of several ... set RANK, WORLD_SIZE", *_RANKS_ALONE),
    ("discover(TORCHRUN)", ThinwireError, "MASTER_ADDR is not set ... torchrun ... 8 ranks"),
    ("discover(OPEN_MPI | {'MASTER_ADDR': 'h'})", ThinwireError, "MASTER_PORT is not set ... Open MPI"),
    ("discover(OPEN_MPI | MEETING | {'MASTER_ADDR': ''})", ThinwireError, "MASTER_ADDR is not set"),
    ("discover(SLURM | _)", ThinwireError, "MASTER_ADDR is not set ... Slurm", "{}",
     "{'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': ''}",
     "{'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'rack[1-2]node[3-4]'}"),  # more than is looked into
    ("discover(SLURM | _)", ThinwireError, "MASTER_PORT is not set ... Slurm",
     "{'SLURM_JOB_NODELIST': 'n1'}", "{'SLURM_JOB_NODELIST': 'n1', 'SLURM_JOB_ID': '\u00b2'}"),
    ("discover(SLURM | MEETING | {'MASTER_PORT': '70000'})", ThinwireError, "MASTER_PORT is 70000 ... 1 to 65535"),
    ("discover(SLURM | MEETING | {'MASTER_PORT': 'ssh'})", ThinwireError, "MASTER_PORT is 'ssh' ... an integer"),
    ("discover(TORCHRUN | MEETING | {'MASTER_ADDR': '_'})", ThinwireError, "MASTER_ADDR is ... name or address alone",
     "tcp://10.0.0.1", "10.0.0.1:29500", "node..7", "a b", "300.1.1.1", "node7:1", "[node7"),
    ("discover(TORCHRUN | {'RANK': '-1'})", ThinwireError, "RANK is '-1' ... at least 0"),
    ("discover(TORCHRUN | {'RANK': _})", ThinwireError, "RANK is ' ... expected an integer", "'\u00b2'", "'9' * 5000"),
    ("discover(TORCHRUN | MEETING | {'RANK': '8'})", ThinwireError, "rank 8 of 8, from torchrun ... 0 <= rank < "),
    ("discover(TORCHRUN | MEETING | {'LOCAL_RANK': 'x'})", ThinwireError, "LOCAL_RANK is 'x'"),
    ("discover(TORCHRUN | MEETING | {'WORLD_SIZE': _})", ThinwireError, "WORLD_SIZE is ' ... expected an integer",
     "'\u00b2'", "'9' * 5000"),
    ("discover(TORCHRUN | MEETING | {'WORLD_SIZE': str(2**31)})", ThinwireError, "'2147483648' ... below 2"),
    ("discover(TORCHRUN | MEETING, rank=1)", ThinwireError, "rank was passed without world_size"),
    ("discover(TORCHRUN | MEETING, world_size=1)", ThinwireError, "world_size was passed without rank"),
    ("discover({}, rank=0, world_size=2)", ThinwireError, "MASTER_ADDR is not set ... the arguments"),
    ("discover({}, rank=2, world_size=2)", ThinwireError, "rank 2 of 2"),
    ("discover({}, rank=0, world_size=0)", ThinwireError, "rank 0 of 0"),
    ("table({})", ThinwireError, "has 4 ranks, and nothing says which ... pass rank=, or set RANK_ID"),
    ("table({'RANK_ID': '4'})", ThinwireError, "has no rank 4, it has ranks 0 to 3"),
    ("table({}, rank=-1)", ThinwireError, "has no rank -1"),
    ("table({'RANK_ID': 'x'})", ThinwireError, "RANK_ID is 'x'"),
    ("table({'RANK_ID': '0'}, world_size=8)", ThinwireError, "world_size is 8, but the rank table that was passed"),
    ("table({'RANK_ID': '0', 'RANK_SIZE': '8'})", ThinwireError, "RANK_SIZE is 8, but"),
    ("table({'RANK': '0', 'WORLD_SIZE': '2'})", ThinwireError, "WORLD_SIZE is 2, but"),
    ("table({'RANK_ID': '0', 'MASTER_PORT': '0'})", ThinwireError, "MASTER_PORT is 0"),
    ("load(ONE_SERVER).entry(_)", RankTableError, "has no rank", "'0'", "None", "1.0", "True", "2**70", "-1", "4"),
    ("load(7)", RankTableError, "rank_table is a int"),
    ("load(b'1')", RankTableError, "rank_table is a bytes"),
    ("load('a' + chr(0))", RankTableError, "cannot be read"),
    ("load('_')", RankTableError, "cannot be read: ... not a regular file", "/dev/zero", "/tmp"),
    ("load([1])", RankTableError, "rank_table is a list, expected a path or a dict"),
    ("load({})", RankTableError, "no field 'server_list'; it has nothing"),
    ("one(server_list=...)", RankTableError, "no field 'server_list'; it has version, server_count, status"),
    ("one(server_list=..., group_list=[])", RankTableError, "no field 'server_list'; it has ... group_list"),
    ("one(version='2.0')", RankTableError, "version is '2.0', expected one of 1.0, 1.2"),
    ("one(status='initializing')", RankTableError, "status is 'initializing', expected 'completed'"),
    ("one(server_list=_)", RankTableError, "server_list is _, expected a list of 1 to", "{}", "[]"),
    ("one(server_count='2')", RankTableError, "server_count is 2, but server_list has 1 entries"),
    ("one(server_count='many')", RankTableError, "server_count is 'many', expected a whole number"),
    ("one(server_list__0='a')", RankTableError, "server_list[0]: 'a', expected an object"),
    ("one(server_list__0__server_id=...)", RankTableError, "server_list[0]: no field 'server_id'; it has device"),
    ("one(server_list__0__server_id=7)", RankTableError, "server_id is 7, expected a string"),
    ("one(server_list__0__server_id=' ')", RankTableError, "server_id is ' ', expected a string that is not empty"),
    ("two(server_list__1__server_id='node_0')", RankTableError, "server_id 'node_0' appears twice"),
    ("two(server_list__1__host_ip=1)", RankTableError, "host_ip is 1, expected a string"),
    ("one(server_list__0__device=...)", RankTableError, "server_list[0]: no field 'device'; it has server_id"),
    ("one(server_list__0__device=None)", RankTableError, "device is None, expected a list"),
    ("one(server_list__0__device__1=3)", RankTableError, "server_list[0]: device[1]: 3, expected an object"),
    ("device(rank_id=...)", RankTableError, "device[1]: no field 'rank_id'; it has device_id, device_ip"),
    ("device(device_id=...)", RankTableError, "device[1]: no field 'device_id'"),
    ("device(rank_id='-1')", RankTableError, "rank_id is '-1', expected a whole number of at least 0"),
    ("device(rank_id='9' * 5000)", RankTableError, "rank_id is '9999 ... , expected a whole number"),
    ("device(rank_id=_)", RankTableError, "rank_id is _", "True", "1.0"),
    ("device(device_ip=5)", RankTableError, "device_ip is 5, expected a string"),
    ("device(device_id='0')", RankTableError, "server_list[0], server 10.155.111.140: device_id 0 appears twice"),
    ("device(rank_id='3')", RankTableError, "rank_id 3 appears twice"),
    ("device(rank_id='9')", RankTableError, "has 4 ranks, expected rank_id 0 to 3; missing: 1; found: 0, 2, 3, 9"),
    # layouts
    ("Layout((2, 0), ('a', 'b'))", LayoutError, "device_matrix is (2, 0), expected ints of at least 1"),
    ("Layout((2.0,), ('a',))", LayoutError, "device_matrix is (2.0,)"),
    ("Layout((2, 2), ('a',))", LayoutError, "2 axes are named ('a',), expected as many"),
    ("Layout((2, 2), ('a', 'a'))", LayoutError, "expected as many others"),
    ("Layout((2,), ('None',))", LayoutError, "1 axes are named ('None',)"),
    ("Layout(8, ('a',))", LayoutError, "device_matrix is 8"),
    ("CUBE('tp', 'None')", LayoutError, "'tp' is no axis of Layout(dp=2, sp=2, mp=2); its axes are 'dp', 'sp', 'mp'"),
    ("CUBE('mp', ('sp', 'mp'))", LayoutError, "'mp' is used twice, in ('mp', 'sp', 'mp')"),
    ("CUBE(('mp', 'mp'))", LayoutError, "'mp' is used twice"),
    ("CUBE(('mp', 'None'))", LayoutError, "'None' is no axis"),
    ("CUBE(None)", LayoutError, "None is no axis"),
    ("CUBE('mp').partial('mp')", LayoutError, "'mp' is used twice, in ('mp', 'mp')"),
    ("CUBE('mp').partial('ep')", LayoutError, "'ep' is no axis"),
    ("CUBE('mp').partial('sp', 'sp')", LayoutError, "used twice"),
    ("CUBE('mp', 'sp').shard_shape((4,))", LayoutError, "2 dimensions, but the shape is [4]"),
    ("CUBE('None', ('mp', 'sp')).slices((3, 6), 0)", LayoutError, "1 has 6 elements, which cannot be cut into 4"),
    ("CUBE.coordinates(8)", LayoutError, "rank is 8, expected 0 to 7"),
    ("CUBE('mp').slices((2,), -1)", LayoutError, "rank is -1"),
    ("as_tensor_layout((3, 1), 8)", LayoutError, "(3, 1) is no layout over 8 ranks"),
    ("as_tensor_layout((0,), 8)", LayoutError, "(0,) is no layout"),
    ("as_tensor_layout(CUBE('mp'), 4)", LayoutError, "for 8 ranks, but there are 4"),
    ("as_tensor_layout('mp', 8)", LayoutError, "'mp' is no layout"),
    ("plan_redistribute((4,), (4,), (2,))", LayoutError, "size must say how many ranks"),
    # wire formats
    ("parse(_)", WireFormatError, "_ ... accepted: none, int8, int8+h64, ... int8:N", "'int7'", "'int8:'", "'int8:0'",
     "''", "'int8:row:64'", "'none:16'", "'INT8'", "' int8'", "None", "8", "'int8+h32'", "'int8+h64:64'"),
    ("parse('_')", WireFormatError, "cannot have groups of ... accepted: none, int8, int8+h64, ... int8:N",
     "int8:8", "int8:100", "int8:2048", "int6:32", "int8:32+h64"),
    ("parse('_:row')", WireFormatError, "'_' cannot have one scale for a row; accepted: none", "int4", "fp8", "int10"),
    ("parse('_+h64')", WireFormatError, "is not rotated; accepted: none", "none", "fp8", "fp8:64"),
    ("WireFormat('int8', 128, rotated=_)", WireFormatError, "rotated of wire format 'int8' is", "1", "None", "'h64'"),
    ("parse('int8').row_bytes(0)", WireFormatError, "hidden must be at least 1"),
    ("parse('none').row_bytes(128)", WireFormatError, "pass dtype"),
    ("WireFormat('int8', 128, 24)", WireFormatError, "alignment 24"),
    # tools, and plans of memory
    ("Settings(hidden=0)", ValueError, "--hidden 0"),
    ("expert_ids(MAXVIO, 9, 12, 4, 3)", ArgumentError, "with --top-k 4 of 12 experts at most maxvio:2 is possible"),
    ("row_counts(MAXVIO, 9, 3)", ArgumentError, "with 3 ranks at most maxvio:2 is possible"),
    ("Finding('problem', 'x', 'broken')", ThinwireError, "has no advice"),
    ("Finding('bad', 'x', 'broken')", ThinwireError, "mark is 'bad'"),
    ("plan_memory(ranks=0, **SIZES)", ThinwireError, "ranks is 0"),
    ("plan_memory(ranks=2, rank=2, **SIZES)", ThinwireError, "rank is 2, expected an int from 0 to 1"),
    ("plan_memory(ranks=2, heap='shm', **SIZES)", ThinwireError, "heap is 'shm', expected one of threads, posix, cuda"),
    ("plan_memory(ranks=2, **SIZES | {'top_k': 33})", ThinwireError, "top_k is 33"),
    ("plan_memory(ranks=2, wire='int9', **SIZES)", ThinwireError, "int9"),
    ("plan_memory(ranks=80, transport='direct', **SIZES)", ThinwireError, "up to 72 ranks"),
)  # fmt: skip


def _load(table: dict[str, Any], **changes: Any) -> None:
    RankTable.load(change(table, **changes))


def ground(comm: Communicator) -> Ground:
    x = torch.zeros(4)
    closed = comm.split(groups=[[0, 1]])
    closed.close()
    names = {
        "tw": tw, "torch": torch, "dist": dist, "comm": comm, "rank": comm.rank, "x": x, "x4": torch.ones(4, 4),
        "lists": [torch.zeros(4), torch.zeros(4)], "closed": closed, "MOST": MOST_BYTES, "run_ranks": run_ranks,
        "in_thread": lambda call: ThreadPoolExecutor(1).submit(call).result(), "plan_memory": plan_memory,
        "Settings": Settings, "expert_ids": expert_ids, "row_counts": row_counts, "Finding": Finding,
        "MAXVIO": Routing("maxvio", 2.1),
        "byte": lambda: torch.zeros(8, dtype=torch.uint8), "freed": freed,
        "peer": lambda buffer: [None if rank == comm.rank else buffer for rank in range(2)],
        "made_in_inference_mode": made_in_inference_mode, "Communicator": Communicator, "ThreadWorld": ThreadWorld,
        "resolve_quorum": resolve_quorum, "Layout": tw.Layout, "PAIR": tw.Layout((2,), ("ep",)),
        "CUBE": tw.Layout((2, 2, 2), ("dp", "sp", "mp")), "as_tensor_layout": as_tensor_layout,
        "plan_redistribute": plan_redistribute, "WireFormat": tw.WireFormat, "parse": tw.WireFormat.parse,
        "encode": encode, "decode": partial(decode, source="rank 3"), "OneOf": OneOf, "pickle": pickle,
        "discover": discover, "load": RankTable.load, "one": partial(_load, ONE_SERVER),
        "two": partial(_load, TWO_SERVERS),
        "device": lambda **changes: _load(ONE_SERVER, **{f"{DEVICE}__{name}": odd for name, odd in changes.items()}),
        "table": partial(discover, rank_table=ONE_SERVER), "ONE_SERVER": ONE_SERVER, "TORCHRUN": TORCHRUN,
        "OPEN_MPI": OPEN_MPI, "SLURM": SLURM, "MEETING": MEETING,
        "SIZES": {"num_experts": 4, "top_k": 2, "hidden_size": 8, "max_tokens": 8},
    }  # fmt: skip

    def go_on() -> None:
        sent = torch.full((2,), comm.rank + 1.0)
        comm.all_reduce(sent)
        assert sent.tolist() == [3.0, 3.0] and not x.any() and comm.exchange_counts([7, 7]) == [7, 7]

    return Ground(names, go_on, alone=True)


@pytest.fixture(scope="module", params=["thread", "process"])
def found(request: pytest.FixtureRequest) -> list[Any]:
    return answers(ground, 2, ROWS, mode=request.param)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_is_refused_before_anything_is_sent(row: Row, found: list[Any]) -> None:
    check(row, found)


def test_errors_of_arguments_are_value_errors() -> None:
    for kind in (ArgumentError, CountsError, LayoutError, RankTableError, WireFormatError):
        assert issubclass(kind, ThinwireError) and issubclass(kind, ValueError)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch; tw.all_reduce(torch.ones(4))", "there is no default communicator: call thinwire.init() first"),
        ("tw.init(); raise SystemExit(1)", "one rank, as no launcher was found: torchrun --nproc-per-node N starts N"),
        ("tw.init(rank=0, world_size=2)", "MASTER_ADDR"),
        ("tw.init(device='cuda')", "device is 'cuda', and no GPU is visible: pass device='cpu'"),
        ("tw.init(device='cuda:3')", "device is 'cuda:3', and no GPU is visible: pass device='cpu'"),
    ],
)
def test_joining_wrongly_is_answered(code: str, words: str) -> None:
    code = f"import thinwire as tw; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and words in done.stderr.strip().splitlines()[-1], done.stdout
