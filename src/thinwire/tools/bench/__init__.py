"""`thinwire bench`: collectives and expert rounds, timed beside what else moves the same bytes, with results checked.

`options` reads what was asked for, without torch. `session` finds or starts the ranks, and is what each of them does: a
*problem* (`problems`) of each operation, size and routing (`traffic`) says what every rank sends and what must arrive;
*contenders* (`contenders`) solve it, and are checked and timed in turn (`timing`). `results` has the table and the
file, `plots` the pictures.
"""
