"""`thinwire bench`: collectives and expert rounds, timed beside what else moves the same bytes, with results checked.

`options` and `sizes` read what was asked for, without torch. `launch` finds or starts the ranks, `session` is what each
of them does. For every operation, size and routing (`traffic`) there is a *problem* (`problems`, `expert_problem`):
what every rank sends, and by `checks` what must arrive. *Contenders* solve it: thinwire's (`operations`) and others
(`baselines`, `routed_rows`, `symmetric_memory`, with `mpi` and `separate`; `deepep` and `flashinfer`, with `installed`
and `rank_rows`). `measure` checks them all and times them in turn, by `timing`, where `memory` has room; `figures` and
`table` say what came out, `machine` on what.
"""
