/* All-reduce, reduce-scatter and all-gather, in epochs of one leg or of two, in any order.
 *
 * In an epoch a rank sends the first leg and signals everyone; once everyone has signalled, it compares what all are
 * doing and takes the leg in. In an all-reduce it then sends the second leg and signals again, and takes that in when
 * everyone has. A memory cell holds the epoch in which it was last written, so a read that comes too early or too late
 * shows. The stores of a leg come in every order; the flags come after them. Every rank has rows for every other.
 *
 * Accesses of one kernel to several ranks that lie between the same two synchronisations are one step: an access of
 * another rank that is not ordered against one of them may come before all of them or after all. Cells that were read
 * for the last time are marked STALE, which the real memory does not do.
 *
 * Flags have two bits of an epoch, so they wrap all the time: a flag that a rank waits for may be behind by two at most,
 * and ahead by one.
 *
 * Parameters: RANKS (2 or 3), EPOCHS. ODD_RANK: in every epoch rank 0 does what it likes, and all must find out if that
 * is not what the others do. BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a
 * state that the search must reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif

#define ALL_REDUCE 0
#define REDUCE_SCATTER 1
#define ALL_GATHER 2
#define UNDECIDED 3

#define BEFORE_FIRST 2
#define FLAG(epoch) ((epoch) & 3)
#define REACHED(flag, epoch) ((((flag) - (epoch)) & 3) < 2) /* triton_kernels/signal.py behind, with two bits */

#define NEVER 15 /* written in no epoch */
#define STALE 14 /* read for the last time */

#ifdef BROKEN_ONE_BUFFER
#define HALF(epoch) 0
#else
#define HALF(epoch) ((epoch) & 1)
#endif
#ifdef BROKEN_ONE_LINE
#define LINE_HALF(epoch) 0
#else
#define LINE_HALF(epoch) ((epoch) & 1)
#endif

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define IN(half, rank, source) ((half) * RANKS * RANKS + AT(rank, source))

byte first_flag[2 * RANKS * RANKS] = FLAG(BEFORE_FIRST);
byte second_flag[RANKS * RANKS] = FLAG(BEFORE_FIRST);
byte line_epoch[2 * RANKS * RANKS] = NEVER;
byte line_op[2 * RANKS * RANKS] = UNDECIDED;
byte scattered[2 * RANKS * RANKS] = NEVER;
byte gathered[2 * RANKS * RANKS] = NEVER;

byte op_of[3 * RANKS] = UNDECIDED; /* what a rank does in an epoch, for the choice and for assertions alone */
#define OP(epoch, rank) op_of[((epoch) % 3) * RANKS + (rank)]
#define RIGHT ((rank + 1) % RANKS)
#define LEFT ((rank + RANKS - 1) % RANKS)

#define LINE 1
#define ROWS 2
#define SECOND 4

byte ranks_done;
#if defined(GOAL_END) || defined(GOAL_AHEAD)
bool goal_reached;
bool met_op[3], met_difference;
byte epochs_read[RANKS];
#endif

#ifdef ODD_RANK
#define FOLLOWS(peer) (rank != 0 && (peer) != 0 && OP(epoch, peer) != UNDECIDED)
#else
#define FOLLOWS(peer) (OP(epoch, peer) != UNDECIDED)
#endif

inline choose() { /* any collective; the same as whoever has chosen for this epoch */
    if
    :: FOLLOWS(RIGHT) -> op = OP(epoch, RIGHT)
    :: FOLLOWS(LEFT) -> op = OP(epoch, LEFT)
    :: !FOLLOWS(RIGHT) && !FOLLOWS(LEFT) ->
        if
        :: op = ALL_REDUCE
        :: op = REDUCE_SCATTER
        :: op = ALL_GATHER
        fi
    fi;
    OP(epoch, rank) = op;
    OP(epoch + 1, rank) = UNDECIDED /* nobody is two epochs behind */
}

inline send_first_leg() {
    atomic {
        epoch++;
        choose();
        peer = 0;
        todo = LINE | ROWS;
#ifndef BROKEN_STALE_SECOND
        if
        :: second_flag[AT(rank, rank)] != FLAG(epoch - 1) -> todo = todo | SECOND
        :: else
        fi
#endif
    }
    do
    :: d_step { /* triton_kernels/collective_wait.py begin_epoch: what this rank does */
        (todo & LINE) -> todo = todo & ~LINE;
        for (peer : 0 .. RANKS - 1) {
            line_epoch[IN(LINE_HALF(epoch), peer, rank)] = epoch;
            line_op[IN(LINE_HALF(epoch), peer, rank)] = op
        };
        peer = 0 }
    :: d_step { /* triton_kernels/collective.py scatter_kernel; triton_kernels/collective.py send_to_all_kernel */
        (todo & ROWS) -> todo = todo & ~ROWS;
        for (peer : 0 .. RANKS - 1) {
            if
            :: op == ALL_GATHER -> gathered[IN(HALF(epoch), peer, rank)] = epoch
            :: else -> scattered[IN(HALF(epoch), peer, rank)] = epoch
            fi
        };
        peer = 0 }
#ifndef BROKEN_STALE_SECOND
    :: d_step { /* triton_kernels/collective_wait.py begin_epoch: the second flag of an epoch that had none */
        (todo & SECOND) -> todo = todo & ~SECOND;
        for (peer : 0 .. RANKS - 1) {
            second_flag[AT(peer, rank)] = FLAG(epoch - 1)
        };
        peer = 0 }
#endif
    :: todo == 0 -> break
    od;
    first_flag[IN(epoch & 1, RIGHT, rank)] = FLAG(epoch); /* triton_kernels/signal.py publish */
#if RANKS > 2
    first_flag[IN(epoch & 1, LEFT, rank)] = FLAG(epoch)
#endif
}

inline await_first() { /* triton_kernels/collective_wait.py await_leg */
    REACHED(first_flag[IN(epoch & 1, rank, RIGHT)], epoch);
#if RANKS > 2
    REACHED(first_flag[IN(epoch & 1, rank, LEFT)], epoch)
#endif
}

inline compare_with(source) { /* triton_kernels/collective_wait.py differs */
    assert(line_epoch[IN(LINE_HALF(epoch), rank, source)] == epoch);
    differs = differs || line_op[IN(LINE_HALF(epoch), rank, source)] != op
}

inline compare() {
    d_step {
#ifndef BROKEN_LEFT_ONLY
        compare_with(RIGHT);
#endif
        compare_with(LEFT);
        assert(differs == (OP(epoch, RIGHT) != OP(epoch, rank) || OP(epoch, LEFT) != OP(epoch, RIGHT)));
#ifdef GOAL_END
        met_op[op] = true;
        met_difference = met_difference || differs;
#endif
    }
}

inline sum_rows() { /* triton_kernels/collective_rows.py sum_tile */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank
            :: else ->
                assert(scattered[IN(HALF(epoch), rank, peer)] == epoch);
                scattered[IN(HALF(epoch), rank, peer)] = STALE
            fi
        };
        peer = 0
    }
}

inline take_gathered() { /* triton_kernels/collective.py gather_recv_kernel */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank
            :: else ->
                assert(gathered[IN(HALF(epoch), rank, peer)] == epoch);
                gathered[IN(HALF(epoch), rank, peer)] = STALE
            fi
        };
        peer = 0
    }
}

inline send_sums() { /* triton_kernels/collective.py reduce_and_send_to_all_kernel */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            gathered[IN(HALF(epoch), peer, rank)] = epoch
        };
        peer = 0
    }
}

inline signal_second() { /* triton_kernels/signal.py publish */
    second_flag[AT(RIGHT, rank)] = FLAG(epoch);
#if RANKS > 2
    second_flag[AT(LEFT, rank)] = FLAG(epoch);
#endif
    second_flag[AT(rank, rank)] = FLAG(epoch)
}

inline await_second() { /* triton_kernels/collective_wait.py await_leg */
    REACHED(second_flag[AT(rank, RIGHT)], epoch);
#if RANKS > 2
    REACHED(second_flag[AT(rank, LEFT)], epoch)
#endif
}

inline all_reduce() {
    sum_rows();
#ifdef BROKEN_EARLY_SECOND
    signal_second();
    send_sums();
#else
    send_sums();
    signal_second();
#endif
    await_second();
    take_gathered()
}

active [RANKS] proctype stream() {
    byte rank, peer, todo, epoch, op, rounds;
    bool differs;
    d_step { rank = _pid; epoch = BEFORE_FIRST }
    do
    :: rounds < EPOCHS ->
        send_first_leg();
#ifdef GOAL_AHEAD
        atomic {
            for (peer : 0 .. RANKS - 1) {
                goal_reached = goal_reached || epochs_read[peer] < rounds
            };
            assert(!goal_reached); /* that a rank signals an epoch before a peer has finished the last one */
            peer = 0
        }
#endif
#ifdef BROKEN_EMPTY_PART_DOES_NOT_WAIT /* rank 0 has no part, and nothing to take in from a reduce-scatter */
        if
        :: rank == 0 && op == REDUCE_SCATTER -> rounds++; goto next
        :: else
        fi;
#endif
        await_first();
        compare();
        if
        :: !differs && op == ALL_REDUCE -> all_reduce()
        :: !differs && op == REDUCE_SCATTER -> sum_rows() /* triton_kernels/collective.py reduce_kernel */
        :: !differs && op == ALL_GATHER -> take_gathered()
#ifdef ODD_RANK
        :: differs -> differs = false /* nothing is taken in, and the next epoch begins */
#endif
        fi;
        d_step {
            op = 0;
            rounds++;
#ifdef GOAL_AHEAD
            epochs_read[rank]++
#endif
        };
next:   skip
    :: rounds == EPOCHS -> break
    od;
    atomic {
        ranks_done++;
#ifdef GOAL_END
        goal_reached = ranks_done == RANKS && met_op[ALL_REDUCE] && met_op[REDUCE_SCATTER] && met_op[ALL_GATHER];
#ifdef ODD_RANK
        goal_reached = goal_reached && met_difference;
#endif
        assert(!goal_reached)
#endif
    }
}
