/* One-way collectives whose messages do not fit: pieces through a ring of slots for each ordered pair of ranks.
 *
 * The pieces of a pair are numbered, and the numbers go on from one collective to the next. At the receiver a flag
 * says how many pieces came, at the sender one says how many were taken. The piece with the number n may be stored
 * when n + 1 - SLOTS pieces were taken. A GPU's ranks go in steps: a rank sends the k-th piece to everyone that gets
 * one, then takes the k-th piece of everyone that sends one. A CPU's ranks send and take by TURNS whatever is possible
 * with whomever. A memory cell holds the collective and the number it was last written with, so a read that comes too
 * early or too late shows. A piece is stored in two halves, in either order.
 *
 * How many pieces a pair has in a collective is any number up to PIECES. Both sides know it before: the headers of the
 * whole messages say it.
 *
 * Numbers have four bits here and begin at 13, so they wrap.
 *
 * Parameters: RANKS (2 or 3), SLOTS, PIECES, COLLECTIVES, TURNS, ALL_OR_NONE (a pair has PIECES pieces or none), ALL
 * (PIECES). SLOTS must divide the numbers' range, or a slot be chosen by a number that does not wrap, as the kernels
 * do. BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state that the search
 * must reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef PIECES
#define PIECES 3
#endif
#ifndef COLLECTIVES
#define COLLECTIVES 2
#endif

#define FIRST_NUMBER 13
#define PLUS(number, other) (((number) + (other)) & 15)
#define REACHED(flag, number) ((((flag) - (number)) & 15) < 8) /* triton_kernels/cpu/signal.py signalled, with four bits */

#define NEVER 255
#define STALE 254
#define TAG(number) (16 * collective + (number))

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define SLOT(rank, source, number) (AT(rank, source) * SLOTS + (number) % SLOTS)

byte came[RANKS * RANKS] = FIRST_NUMBER; /* [AT(receiver, sender)]: pieces sent */
byte consumed[RANKS * RANKS] = FIRST_NUMBER; /* [AT(sender, receiver)]: pieces read */
byte slot_first[RANKS * RANKS * SLOTS] = NEVER;
byte slot_second[RANKS * RANKS * SLOTS] = NEVER;

#define COUNT(collective, receiver, sender) pieces[(collective) * RANKS * RANKS + AT(receiver, sender)]
byte pieces[COLLECTIVES * RANKS * RANKS]; /* what both sides know */
bool counts_known;

byte ranks_done;
#if defined(GOAL_END) || defined(GOAL_FULL)
bool goal_reached;
#endif

init {
    byte cell, count;
    atomic {
        for (cell : 0 .. COLLECTIVES * RANKS * RANKS - 1) {
            if
            :: (cell % RANKS) == (cell / RANKS) % RANKS
            :: else ->
#ifdef ALL
                count = PIECES;
#else
#ifdef ALL_OR_NONE
                if :: count = 0 :: count = PIECES fi;
#else
                select(count : 0 .. PIECES);
#endif
#endif
                pieces[cell] = count
            fi
        };
        cell = 0;
        count = 0;
        counts_known = true
    }
}

#ifdef BROKEN_NO_CREDITS
#define HAS_ROOM(peer) true
#else
/* triton_kernels/cpu/channel.py ring_has_room */
#define HAS_ROOM(peer) REACHED(consumed[AT(rank, peer)], PLUS(sent[peer], 17 - SLOTS))
#endif
/* triton_kernels/cpu/channel.py ring_has_piece */
#define HAS_PIECE(peer) REACHED(came[AT(rank, peer)], PLUS(got[peer], 1))

inline store_piece(peer) {
    if /* triton_kernels/cpu/channel.py send_next; triton_kernels/channel.py send_rows_kernel */
    :: slot_first[SLOT(peer, rank, sent[peer])] = TAG(sent[peer]);
        slot_second[SLOT(peer, rank, sent[peer])] = TAG(sent[peer])
    :: slot_second[SLOT(peer, rank, sent[peer])] = TAG(sent[peer]);
        slot_first[SLOT(peer, rank, sent[peer])] = TAG(sent[peer])
    fi;
    d_step { /* triton_kernels/cpu/channel.py send_next; triton_kernels/channel.py publish_header */
        sent[peer] = PLUS(sent[peer], 1);
        came[AT(peer, rank)] = sent[peer]
    }
}

inline give_slot_back(peer) { /* triton_kernels/cpu/channel.py recv_next; triton_kernels/channel.py publish_head */
    consumed[AT(peer, rank)] = PLUS(got[peer], 1)
}

inline take_piece(peer) {
#ifdef BROKEN_EARLY_CREDIT
    give_slot_back(peer);
#endif
    d_step { /* triton_kernels/cpu/channel.py recv_next; triton_kernels/channel.py recv_rows_kernel */
        assert(slot_first[SLOT(rank, peer, got[peer])] == TAG(got[peer]));
        assert(slot_second[SLOT(rank, peer, got[peer])] == TAG(got[peer]));
        slot_first[SLOT(rank, peer, got[peer])] = STALE;
        slot_second[SLOT(rank, peer, got[peer])] = STALE
    }
#ifndef BROKEN_EARLY_CREDIT
    give_slot_back(peer);
#endif
    got[peer] = PLUS(got[peer], 1)
}

inline send_piece(peer) {
    if
    :: k >= COUNT(collective, peer, rank)
    :: k < COUNT(collective, peer, rank) ->
#ifdef GOAL_FULL
        atomic {
            goal_reached = !HAS_ROOM(peer);
            assert(!goal_reached) /* that a sender has to wait for a slot */
        };
#endif
        HAS_ROOM(peer); /* triton_kernels/channel.py wait_kernel */
        store_piece(peer)
    fi
}

inline read_piece(peer) {
    if
    :: k >= COUNT(collective, rank, peer)
    :: k < COUNT(collective, rank, peer) ->
        HAS_PIECE(peer); /* triton_kernels/channel.py wait_kernel */
        take_piece(peer)
    fi
}

#define RIGHT ((rank + 1) % RANKS)
#define LEFT ((rank + 2) % RANKS)

#define ANYTHING_TO_SEND(peer) (next_out[peer] < COUNT(collective, peer, rank))
#define ANYTHING_TO_TAKE(peer) (next_in[peer] < COUNT(collective, rank, peer))
#if RANKS > 2
#define NOTHING_LEFT \
    !(ANYTHING_TO_SEND(RIGHT) || ANYTHING_TO_TAKE(RIGHT) || ANYTHING_TO_SEND(LEFT) || ANYTHING_TO_TAKE(LEFT))
#else
#define NOTHING_LEFT !(ANYTHING_TO_SEND(RIGHT) || ANYTHING_TO_TAKE(RIGHT))
#endif

inline send_step() {
    send_piece(RIGHT);
#if RANKS > 2
    send_piece(LEFT)
#endif
}

inline read_step() {
    read_piece(RIGHT);
#if RANKS > 2
    read_piece(LEFT)
#endif
}

active [RANKS] proctype stream() {
    byte rank, collective, k;
    byte sent[RANKS], got[RANKS]; /* numbers that go on for good */
#ifdef TURNS
    byte next_out[RANKS], next_in[RANKS]; /* pieces of this collective */
#endif
    atomic {
        counts_known;
        rank = _pid - 1;
        for (k : 0 .. RANKS - 1) {
            sent[k] = FIRST_NUMBER;
            got[k] = FIRST_NUMBER
        };
        k = 0
    }
    do
    :: collective < COLLECTIVES ->
#ifdef BROKEN_SEND_ALL_FIRST
        do
        :: k < PIECES -> send_step(); k++
        :: k == PIECES -> k = 0; break
        od;
        do
        :: k < PIECES -> read_step(); k++
        :: k == PIECES -> k = 0; break
        od;
#else
#ifdef BROKEN_PEER_BY_PEER
        do
        :: k < PIECES -> send_piece(RIGHT); read_piece(RIGHT); k++
        :: k == PIECES -> k = 0; break
        od;
        do
        :: k < PIECES -> send_piece(LEFT); read_piece(LEFT); k++
        :: k == PIECES -> k = 0; break
        od;
#else
#ifdef TURNS
        do /* triton_kernels/cpu/channel.py move: whatever is possible with whomever */
        :: ANYTHING_TO_SEND(RIGHT) && HAS_ROOM(RIGHT) -> store_piece(RIGHT); next_out[RIGHT]++
        :: ANYTHING_TO_TAKE(RIGHT) && HAS_PIECE(RIGHT) -> take_piece(RIGHT); next_in[RIGHT]++
#if RANKS > 2
        :: ANYTHING_TO_SEND(LEFT) && HAS_ROOM(LEFT) -> store_piece(LEFT); next_out[LEFT]++
        :: ANYTHING_TO_TAKE(LEFT) && HAS_PIECE(LEFT) -> take_piece(LEFT); next_in[LEFT]++
#endif
        :: atomic {
            NOTHING_LEFT -> /* triton_kernels/cpu/channel.py unfinished */
            next_out[RIGHT] = 0;
            next_in[RIGHT] = 0;
#if RANKS > 2
            next_out[LEFT] = 0;
            next_in[LEFT] = 0;
#endif
            break }
        od;
#else
        do /* triton_kernels/channel.py wait_kernel and its neighbours, a step a piece */
        :: k < PIECES -> send_step(); read_step(); k++
        :: k == PIECES -> k = 0; break
        od;
#endif
#endif
#endif
#ifdef BROKEN_NUMBERS_RESTART
        atomic {
            for (k : 0 .. RANKS - 1) {
                sent[k] = FIRST_NUMBER;
                got[k] = FIRST_NUMBER
            };
            k = 0
        }
#endif
        collective++
    :: collective == COLLECTIVES -> break
    od;
    atomic {
        ranks_done++;
#ifdef GOAL_END
        goal_reached = ranks_done == RANKS && sent[RIGHT] == PLUS(FIRST_NUMBER, COLLECTIVES * PIECES);
        assert(!goal_reached)
#endif
    }
}
