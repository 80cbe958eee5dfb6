"""`thinwire bench`: collectives and expert rounds, timed beside what else moves the same bytes, with results checked.

`options` reads what was asked for, without torch. `launch` finds or starts the ranks, `session` is what each
of them does. For every operation, size and routing (`traffic`) there is a *problem* (`problems`, `expert_problem`):
what every rank sends, and by `checks` what must arrive. *Contenders* solve it: thinwire's (`operations`) and others
(`baselines` and `routed_rows`, with `mpi`). `measure` checks them all and times in turn, by `timing`; `figures` says
what came out, `machine` on what, and what fits there.
"""
