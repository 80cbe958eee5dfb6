/* Legs: all one-way traffic over peers' memory, all-to-all-v, all-reduce, reduce-scatter and all-gather.
 *
 * In every epoch, which the kernels call a leg, a rank stores rows for its peers into the half of the epoch's parity,
 * publishes a header to everyone, with rows or without, waits for everyone's header, takes in what came, and only then
 * begins the next epoch.
 *
 * Without one of these macros that is all, and a pair has rows in an epoch or none:
 * COLLECTIVE: any of three collectives, one after the other. The header says which one, and all compare. An all-reduce
 * takes a second epoch for its sums, which has a flag and no words.
 * RING_STEPS: all-to-all-v. The header says how many pieces a pair has. The first lies in the half, the
 * others go through a ring of slots. They are numbered, and the numbers go on from epoch to epoch: the tail says how
 * many were stored, the head how many were taken, and number n may be stored once n + 1 - SLOTS were taken. In steps, a
 * rank stores a piece for everyone that gets one, then takes a piece of everyone that sends one.
 *
 * A memory cell holds the epoch in which it was last written, and in a ring the number as well, so a read that comes
 * too early or too late shows. Before the flag that publishes them stores come in any order: the header's words, and
 * rows, which in all-to-all-v have two parts. What was read for the last time is gone, which the real memory does not
 * do.
 *
 * Accesses of one kernel to several ranks that lie between the same two synchronisations are one step: an access of
 * another rank that is not ordered against one of them may come before all of them or after all.
 *
 * Flags have two bits of an epoch in collectives and three elsewhere; numbers of pieces have four. All of them wrap.
 *
 * Parameters: RANKS (2 or 3), EPOCHS (of COLLECTIVE calls), SLOTS, and PIECES, the most that a pair has in the ring in
 * an epoch. SLOTS must divide the range of numbers, or a slot be chosen by a number that does not wrap, as the
 * kernels do. ALL_OR_NONE: a pair has all pieces or no rows. ALL: all pieces. ODD_RANK: each time rank 0 calls what
 * it likes, and all must find out if that is not what the others call. BROKEN_...: the protocol with one rule broken;
 * the search must find an error. GOAL_...: a state that the search must reach, written as an assertion that it does
 * not.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifdef RING_STEPS
#define RING
#ifndef PIECES
#define PIECES 3
#endif
#else
#define PIECES 0
#endif

/* Memory. */

#ifdef COLLECTIVE
#define RANGE 4
#else
#define RANGE 8
#endif
#define BEFORE_FIRST 5
#define FLAG(epoch) ((epoch) % RANGE)
/* triton_kernels/signal.py behind, with a few bits */
#define REACHED(flag, epoch) ((((flag) - (epoch)) & (RANGE - 1)) < RANGE / 2)

#define FIRST_NUMBER 13
#define PLUS(number, other) (((number) + (other)) & 15)
#define COUNTED(flag, number) ((((flag) - (number)) & 15) < 8)

#define NOTHING 255 /* never written, or read for the last time */

#ifdef BROKEN_ONE_HALF
#define HALF(epoch) 0
#else
#ifdef BROKEN_SAME_HALF /* by the parity of the call */
#define HALF(epoch) (rounds & 1)
#else
#define HALF(epoch) ((epoch) & 1)
#endif
#endif
#ifdef BROKEN_ONE_HEADER
#define HEADER_HALF(epoch) 0
#else
#define HEADER_HALF(epoch) ((epoch) & 1)
#endif

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define IN(half, rank, source) ((half) * RANKS * RANKS + AT(rank, source))
#define SLOT(rank, source, number) (AT(rank, source) * SLOTS + (number) % SLOTS)

byte header_flag[2 * RANKS * RANKS] = FLAG(BEFORE_FIRST);
byte header_epoch[2 * RANKS * RANKS] = NOTHING; /* when the words behind the flag were written, */
byte header_says[2 * RANKS * RANKS];          /* and what they say: which collective, or how many pieces */
byte half_first[2 * RANKS * RANKS] = NOTHING;
byte half_second[2 * RANKS * RANKS] = NOTHING;
#ifdef RING
byte slot_first[RANKS * RANKS * SLOTS] = NOTHING;
byte slot_second[RANKS * RANKS * SLOTS] = NOTHING;
byte tail[RANKS * RANKS] = FIRST_NUMBER; /* pieces that the source has stored */
byte head[RANKS * RANKS] = FIRST_NUMBER; /* [AT(source, destination)]: pieces that the destination has taken */
#define TAG(number) (16 * (epoch - BEFORE_FIRST) + (number))
#endif

#define RIGHT ((rank + 1) % RANKS)
#define LEFT ((rank + RANKS - 1) % RANKS)

/* If empty messages had no header, only those would hear of an epoch who get rows, and only those be awaited who send
 * some. Here rank 0 never has rows for rank 1, and both know it. */
#ifdef BROKEN_ONLY_ROWS_SIGNAL
#define CONNECTED(source, target) ((source) != 0 || (target) != 1)
#else
#define CONNECTED(source, target) true
#endif

byte ranks_done;
#if defined(GOAL_END) || defined(GOAL_AHEAD) || defined(GOAL_FULL)
bool goal_reached;
bool met_op[3], met_difference, met_no_peers, met_all_peers;
byte epochs_read[RANKS];
#endif

/* What a rank does in an epoch. */

#ifdef COLLECTIVE
#define ALL_REDUCE 0
#define REDUCE_SCATTER 1
#define ALL_GATHER 2
#define UNDECIDED 3

byte op_of[4 * RANKS] = UNDECIDED; /* what a rank calls from an epoch on, for the choice and for assertions alone */
#define OP(epoch, rank) op_of[((epoch) % 4) * RANKS + (rank)]

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
    OP(epoch + 1, rank) = UNDECIDED;
    OP(epoch + 2, rank) = UNDECIDED /* nobody is two epochs behind */
}
#define SAYS(peer) op
#define ROWS_IN_HALF(peer) ((peer) != rank)
#else
inline choose() { /* any number of pieces for each peer */
    peer = 0;
    do
    :: peer < RANKS && peer != rank && CONNECTED(rank, peer) ->
#ifdef ALL
        to_send[peer] = PIECES + 1;
#else
#ifdef ALL_OR_NONE
        if
        :: to_send[peer] = 0
        :: to_send[peer] = PIECES + 1
        fi;
#else
        do
        :: to_send[peer] < PIECES + 1 -> to_send[peer]++
        :: break
        od;
#endif
#endif
        peer++
    :: peer < RANKS && (peer == rank || !CONNECTED(rank, peer)) -> peer++
    :: peer == RANKS -> break
    od
}
#define SAYS(peer) to_send[peer]
#define ROWS_IN_HALF(peer) (to_send[peer] > 0)
#endif

/* Halves and headers, which all traffic has. */

#define HEADER 1
#define PART_FIRST 2
#ifdef COLLECTIVE /* there are enough states without a second part */
#define PART_SECOND 0
#else
#define PART_SECOND 4
#endif

inline store_part(cell) { /* in collectives the first part stands for all */
    for (peer : 0 .. RANKS - 1) {
        if
        :: ROWS_IN_HALF(peer) -> cell = epoch
        :: else
        fi
    };
    peer = 0
}

inline publish_header_to(target) {
#ifdef BROKEN_ONLY_ROWS_SIGNAL
    if
    :: !CONNECTED(rank, target)
    :: else ->
#endif
        header_flag[IN(HEADER_HALF(epoch), target, rank)] = FLAG(epoch)
#ifdef BROKEN_ONLY_ROWS_SIGNAL
    fi
#endif
}

inline publish_header() { /* triton_kernels/signal.py publish */
    publish_header_to(RIGHT);
#if RANKS > 2
    publish_header_to(LEFT)
#endif
}

inline store_first_leg() { /* and the header's words */
    atomic {
        epoch++;
        choose();
        peer = 0;
        todo = HEADER | PART_FIRST | PART_SECOND;
#ifdef BROKEN_EARLY_HEADER
        publish_header();
#endif
    }
    do
    :: d_step { /* triton_kernels/legs.py publish_header */
        (todo & HEADER) -> todo = todo & ~HEADER;
        for (peer : 0 .. RANKS - 1) {
            header_epoch[IN(HEADER_HALF(epoch), peer, rank)] = epoch;
            header_says[IN(HEADER_HALF(epoch), peer, rank)] = SAYS(peer)
        };
        peer = 0 }
    :: d_step { /* triton_kernels/collective.py send_kernel */
        (todo & PART_FIRST) -> todo = todo & ~PART_FIRST;
        store_part(half_first[IN(HALF(epoch), peer, rank)]) }
#ifndef COLLECTIVE
    :: d_step { /* triton_kernels/pieces.py send_rows_kernel */
        (todo & PART_SECOND) -> todo = todo & ~PART_SECOND;
        store_part(half_second[IN(HALF(epoch), peer, rank)]) }
#endif
    :: todo == 0 -> break
    od
}

#define HEADER_CAME(source) \
    (!CONNECTED(source, rank) || REACHED(header_flag[IN(HEADER_HALF(epoch), rank, source)], epoch))

inline wait_headers() { /* triton_kernels/signal.py wait_for_all */
    HEADER_CAME(RIGHT);
#if RANKS > 2
    HEADER_CAME(LEFT)
#endif
}

inline take(cell, tag) {
    assert(cell == tag);
    cell = NOTHING
}

inline reach_goal_ahead() { /* that a rank has signalled an epoch before a peer has finished the last one */
    atomic {
        for (peer : 0 .. RANKS - 1) {
            goal_reached = goal_reached || epochs_read[peer] < rounds
        };
        assert(!goal_reached);
        peer = 0
    }
}

inline epoch_is_read() {
#ifdef GOAL_AHEAD
    epochs_read[rank]++;
#endif
    rounds++
}

/* Collectives. */

#ifdef COLLECTIVE
inline compare_with(source) { /* triton_kernels/legs.py differing_signatures */
    take(header_epoch[IN(HEADER_HALF(epoch), rank, source)], epoch);
    differs = differs || header_says[IN(HEADER_HALF(epoch), rank, source)] != op;
    header_says[IN(HEADER_HALF(epoch), rank, source)] = 0
}

inline compare() {
    d_step {
#if RANKS > 2 && !defined(BROKEN_LEFT_ONLY)
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

inline take_rows() { /* triton_kernels/collective_rows.py sum_tile; triton_kernels/collective.py gather_recv_kernel */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank
            :: else ->
                take(half_first[IN(HALF(epoch), rank, peer)], epoch)
            fi
        };
        peer = 0
    }
}

inline drop_rows() { /* nothing is taken in, and the next epoch begins */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            half_first[IN(HALF(epoch), rank, peer)] = NOTHING
        };
        peer = 0;
        differs = false
    }
}

inline store_sums() { /* triton_kernels/collective.py reduce_kernel; of an epoch that has begun */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank
            :: else -> half_first[IN(HALF(epoch), peer, rank)] = epoch
            fi
        };
        peer = 0
    }
}

inline all_reduce() {
    take_rows();
    epoch++;
#ifdef BROKEN_EARLY_SUMS
    publish_header();
#endif
    store_sums();
#ifndef BROKEN_EARLY_SUMS
    publish_header();
#endif
    wait_headers(); /* triton_kernels/legs.py wait_leg */
    take_rows()
}

active [RANKS] proctype stream() {
    byte rank, peer, todo, epoch, op, rounds;
    bool differs;
    d_step { rank = _pid; epoch = BEFORE_FIRST }
    do
    :: rounds < EPOCHS ->
        store_first_leg();
#ifndef BROKEN_EARLY_HEADER
        publish_header();
#endif
#ifdef GOAL_AHEAD
        reach_goal_ahead();
#endif
#ifdef BROKEN_EMPTY_PART_DOES_NOT_WAIT /* rank 0 has no part, and nothing to take in from a reduce-scatter */
        if
        :: rank == 0 && op == REDUCE_SCATTER -> rounds++; goto next
        :: else
        fi;
#endif
#ifdef BROKEN_LEAVES_EARLY /* the first header that differs is enough */
        HEADER_CAME(RIGHT);
        if
        :: header_says[IN(HEADER_HALF(epoch), rank, RIGHT)] != op -> rounds++; goto next
        :: else
        fi;
#endif
        wait_headers();
        compare();
        if
        :: !differs && op == ALL_REDUCE -> all_reduce()
        :: !differs && op != ALL_REDUCE -> take_rows() /* triton_kernels/collective.py reduce_kernel */
#ifdef ODD_RANK
        :: differs -> drop_rows()
#endif
        fi;
        d_step {
            op = 0;
            epoch_is_read()
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
#else

/* All-to-all-v. */

#ifdef BROKEN_TAKES_EXPECTED /* rank 0 takes a piece out of each ring, whatever the header says */
#define RING_PIECES(says) (rank == 0 -> 1 : (says) - ((says) > 0))
#else
#define RING_PIECES(says) ((says) - ((says) > 0))
#endif

inline take_first_piece(source, reading) { /* triton_kernels/pieces.py recv_rows_kernel */
    take(header_epoch[IN(HEADER_HALF(reading), rank, source)], reading);
    if
    :: header_says[IN(HEADER_HALF(reading), rank, source)] > 0 ->
        take(half_first[IN(HALF(reading), rank, source)], reading);
        take(half_second[IN(HALF(reading), rank, source)], reading)
    :: else
    fi;
#ifdef RING
    to_take[source] = RING_PIECES(header_says[IN(HEADER_HALF(reading), rank, source)]);
#endif
    header_says[IN(HEADER_HALF(reading), rank, source)] = 0
}

inline take_first_pieces(reading) { /* triton_kernels/pieces.py recv_rows_kernel */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank || !CONNECTED(peer, rank)
            :: else -> take_first_piece(peer, reading)
            fi
        };
        peer = 0
    }
}

#ifdef BROKEN_NO_HEADS
#define HAS_ROOM(peer) true
#else
/* triton_kernels/all_to_all_v.py wait_kernel */
#define HAS_ROOM(peer) COUNTED(head[AT(rank, peer)], PLUS(sent[peer], 17 - SLOTS))
#endif
#ifdef BROKEN_CLEARED_FLAG /* set by its writer, cleared by its reader */
#define HAS_PIECE(peer) (tail[AT(rank, peer)] == 1)
#else
#ifdef BROKEN_EQUALITY
#define HAS_PIECE(peer) (tail[AT(rank, peer)] == PLUS(taken[peer], 1))
#else
/* triton_kernels/all_to_all_v.py wait_kernel */
#define HAS_PIECE(peer) COUNTED(tail[AT(rank, peer)], PLUS(taken[peer], 1))
#endif
#endif

#define SENDS(peer) (to_send[peer] > 0)
#define TAKES(peer) (to_take[peer] > 0)

inline store_piece(cell, first, last) { /* triton_kernels/pieces.py send_rows_kernel */
    d_step {
        for (peer : first .. last) {
            if
            :: SENDS(peer) -> cell = TAG(sent[peer])
            :: else
            fi
        };
        peer = 0
    }
}

inline store_pieces(first, last) { /* for all those ranks, in two parts and any order */
    if
    :: store_piece(slot_first[SLOT(peer, rank, sent[peer])], first, last);
        store_piece(slot_second[SLOT(peer, rank, sent[peer])], first, last)
    :: store_piece(slot_second[SLOT(peer, rank, sent[peer])], first, last);
        store_piece(slot_first[SLOT(peer, rank, sent[peer])], first, last)
    fi
}

inline publish_tail(target) { /* triton_kernels/pieces.py publish_tail */
    if
    :: SENDS(target) ->
        d_step {
            to_send[target]--;
            sent[target] = PLUS(sent[target], 1);
#ifdef BROKEN_CLEARED_FLAG
            tail[AT(target, rank)] = 1
#else
            tail[AT(target, rank)] = sent[target]
#endif
        }
    :: !SENDS(target)
    fi
}

inline publish_tail_early(target) {
    if
    :: SENDS(target) -> tail[AT(target, rank)] = PLUS(sent[target], 1)
    :: else
    fi
}

inline take_pieces(first, last) {
    d_step { /* triton_kernels/pieces.py recv_rows_kernel */
        for (peer : first .. last) {
            if
            :: TAKES(peer) ->
                take(slot_first[SLOT(rank, peer, taken[peer])], TAG(taken[peer]));
                take(slot_second[SLOT(rank, peer, taken[peer])], TAG(taken[peer]));
#ifdef BROKEN_CLEARED_FLAG
                tail[AT(rank, peer)] = 0
#endif
            :: else
            fi
        };
        peer = 0
    }
}

inline publish_head(target) { /* triton_kernels/pieces.py publish_head */
    if
    :: TAKES(target) ->
        d_step {
            to_take[target]--;
            taken[target] = PLUS(taken[target], 1);
            head[AT(target, rank)] = taken[target]
        }
    :: !TAKES(target)
    fi
}

inline publish_head_early(target) {
    if
    :: TAKES(target) -> head[AT(target, rank)] = PLUS(taken[target], 1)
    :: else
    fi
}

inline wait_for_room(target) { /* triton_kernels/all_to_all_v.py wait_kernel */
#ifdef GOAL_FULL
    atomic {
        goal_reached = SENDS(target) && !HAS_ROOM(target);
        assert(!goal_reached) /* that a sender has to wait for a slot */
    };
#endif
    !SENDS(target) || HAS_ROOM(target)
}

inline send_step() {
    wait_for_room(RIGHT);
#if RANKS > 2
    wait_for_room(LEFT);
#endif
#ifdef BROKEN_EARLY_TAIL
    publish_tail_early(RIGHT);
#endif
    store_pieces(0, RANKS - 1);
    publish_tail(RIGHT);
#if RANKS > 2
    publish_tail(LEFT)
#endif
}

inline take_step() {
    !TAKES(RIGHT) || HAS_PIECE(RIGHT); /* triton_kernels/all_to_all_v.py wait_kernel */
#if RANKS > 2
    !TAKES(LEFT) || HAS_PIECE(LEFT);
#endif
#ifdef BROKEN_EARLY_HEAD
    publish_head_early(RIGHT);
#endif
    take_pieces(0, RANKS - 1);
    publish_head(RIGHT);
#if RANKS > 2
    publish_head(LEFT)
#endif
}

#if RANKS > 2
#define SOMETHING_LEFT (SENDS(RIGHT) || SENDS(LEFT) || TAKES(RIGHT) || TAKES(LEFT))
#else
#define SOMETHING_LEFT (SENDS(RIGHT) || TAKES(RIGHT))
#endif

inline step_with(target) {
    wait_for_room(target);
    store_pieces(target, target);
    publish_tail(target);
    !TAKES(target) || HAS_PIECE(target);
    take_pieces(target, target);
    publish_head(target)
}

inline steps() { /* triton_kernels/all_to_all_v.py wait_kernel and its neighbours */
    wait_headers();
    take_first_pieces(epoch);
#ifdef BROKEN_SEND_ALL_FIRST
    do
    :: SENDS(RIGHT) || SENDS(LEFT) -> send_step()
    :: else -> break
    od;
    do
    :: TAKES(RIGHT) || TAKES(LEFT) -> take_step()
    :: else -> break
    od
#else
#ifdef BROKEN_PEER_BY_PEER
    do
    :: SENDS(RIGHT) || TAKES(RIGHT) -> step_with(RIGHT)
    :: else -> break
    od;
    do
    :: SENDS(LEFT) || TAKES(LEFT) -> step_with(LEFT)
    :: else -> break
    od
#else
    do
    :: SOMETHING_LEFT -> send_step(); take_step()
    :: else -> break
    od
#endif
#endif
}

active [RANKS] proctype stream() {
    byte rank, peer, todo, epoch, rounds;
    byte to_send[RANKS]; /* pieces of this epoch that are left; the first is not counted once the header is out */
#ifdef RING
    byte to_take[RANKS];
    byte sent[RANKS], taken[RANKS]; /* numbers that go on for good */
#endif
    atomic {
        rank = _pid;
#ifdef RING
        for (peer : 0 .. RANKS - 1) {
            sent[peer] = FIRST_NUMBER;
            taken[peer] = FIRST_NUMBER
        };
        peer = 0;
#endif
        epoch = BEFORE_FIRST
    }
    do
    :: rounds < EPOCHS ->
        store_first_leg();
#ifndef BROKEN_EARLY_HEADER
        publish_header();
#endif
        atomic {
#ifdef GOAL_END
            met_no_peers = met_no_peers || (to_send[RIGHT] == 0 && to_send[LEFT] == 0);
            met_all_peers = met_all_peers || (to_send[RIGHT] > 0 && to_send[LEFT] > 0);
#endif
            for (peer : 0 .. RANKS - 1) {
                to_send[peer] = to_send[peer] - (to_send[peer] > 0)
            };
            peer = 0
        }
#ifdef GOAL_AHEAD
        reach_goal_ahead();
#endif
#ifdef BROKEN_LATE_TAKE /* what came is taken in only when the next epoch has begun */
        if
        :: rounds == 0
        :: rounds > 0 -> take_first_pieces(epoch - 1)
        fi;
        wait_headers();
#else
#ifdef RING_STEPS
        steps();
#else
        wait_headers();
        take_first_pieces(epoch);
#endif
#endif
#ifdef BROKEN_NUMBERS_RESTART
        atomic {
            for (peer : 0 .. RANKS - 1) {
                sent[peer] = FIRST_NUMBER;
                taken[peer] = FIRST_NUMBER
            };
            peer = 0
        };
#endif
        atomic { epoch_is_read() }
    :: rounds == EPOCHS -> break
    od;
    atomic {
        ranks_done++;
#ifdef GOAL_END
        goal_reached = ranks_done == RANKS && met_no_peers && met_all_peers;
#ifdef RING
        goal_reached = goal_reached && sent[RIGHT] == PLUS(FIRST_NUMBER, EPOCHS * PIECES);
#endif
        assert(!goal_reached)
#endif
    }
}
#endif
