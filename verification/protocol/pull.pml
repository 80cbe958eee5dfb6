/* CPU ranks that pull: lines say what is where in the sender's memory, readers say what they have taken, ranks sleep.
 *
 * Rank 0 writes a piece into a slot of its own memory and puts a line for it at each reader; it writes a slot again once
 * all readers have taken the line that named it. A reader waits for the next line, reads the slot and takes the line. Who
 * waits says how many peers are late and which, looks again, and sleeps unless that number has changed; who has put or
 * taken a line wakes a peer whose number it counts to 0. Sleep has no other end here: a lost wake-up is a deadlock.
 *
 * Parameters: READERS, PIECES, SLOTS. BROKEN_...: the protocol with one rule broken; the search must find an error.
 * GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifndef READERS
#define READERS 2
#endif
#ifndef PIECES
#define PIECES 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#define RANKS (READERS + 1)
#define PAIR(owner, peer) ((owner) * RANKS + (peer))

byte slot[SLOTS]; /* which piece it holds, from 1 on; 0 while it is written */
byte lines[RANKS]; /* put at a reader */
byte taken[RANKS]; /* by a reader */
short asleep[RANKS]; /* peers that a rank sleeps for */
bool awaited[RANKS * RANKS];
bool sleeps[RANKS], woken[RANKS];

#if defined(GOAL_END) || defined(GOAL_SLEPT)
bool goal_reached;
#endif

/* After a line was put or taken, triton_kernels/cpu/lines.py wake: of one peer, as the order is of no account. */
inline wake(me, peer) {
#ifdef BROKEN_NO_LOOK_AT_AWAITED
    woken[peer] = woken[peer]; /* nobody is woken */
#else
    if
    :: atomic { awaited[PAIR(peer, me)] -> awaited[PAIR(peer, me)] = false };
        atomic {
            asleep[peer]--;
            if
            :: asleep[peer] == 0 && sleeps[peer] -> woken[peer] = true
            :: else
            fi
        }
    :: !awaited[PAIR(peer, me)]
    fi
#endif
}

/* Sleeps once, triton_kernels/cpu/lines.py wait_kernel; LATE(peer): whether something is missing of a peer. */
#define SLEEP_ON(me, first, last, count, peer, LATE, value) \
    count = 0; \
    peer = first; \
    do \
    :: peer <= last -> late[peer] = LATE(peer); count = count + late[peer]; peer++ \
    :: else -> break \
    od; \
    asleep[me] = count; \
    peer = first; \
    do \
    :: peer <= last -> \
        if \
        :: late[peer] -> awaited[PAIR(me, peer)] = true \
        :: else \
        fi; \
        peer++ \
    :: else -> break \
    od; \
    peer = first; \
    do \
    :: peer <= last -> LOOK_AGAIN(me, peer, LATE); peer++ \
    :: else -> break \
    od; \
    value = asleep[me]; \
    atomic { \
        if \
        :: value > 0 && (asleep[me] == value || IGNORES_CHANGE) -> sleeps[me] = true; SLEPT \
        :: else -> goto SKIP(me) \
        fi \
    } \
    atomic { woken[me] -> woken[me] = false; sleeps[me] = false };

#ifdef BROKEN_NO_SECOND_LOOK
#define LOOK_AGAIN(me, peer, LATE) skip
#else
#define LOOK_AGAIN(me, peer, LATE) \
    if \
    :: late[peer] && !LATE(peer) -> \
        atomic { \
            if \
            :: awaited[PAIR(me, peer)] -> awaited[PAIR(me, peer)] = false; asleep[me]-- \
            :: else \
            fi \
        } \
    :: else \
    fi
#endif
#ifdef BROKEN_SLEEPS_ANYWAY
#define IGNORES_CHANGE true
#else
#define IGNORES_CHANGE false
#endif
#ifdef GOAL_SLEPT
#define SLEPT goal_reached = true; assert(!(goal_reached))
#else
#define SLEPT skip
#endif

#define NOT_TAKEN(peer) (taken[peer] + SLOTS < piece)
#define NO_LINE(peer) (lines[me] < piece)
#define SKIP(me) awake

active proctype writer() {
    byte piece = 1, peer, count;
    short value;
    bool late[RANKS];
    do
    :: piece <= PIECES ->
        /* A slot is free once all readers have taken the line that named it. */
        do
#ifdef BROKEN_NO_ACKNOWLEDGEMENT
        :: true -> break
#else
        :: true ->
            peer = 1;
            do
            :: peer < RANKS && !NOT_TAKEN(peer) -> peer++
            :: else -> break
            od;
            if
            :: peer == RANKS -> break
            :: else
            fi;
            SLEEP_ON(0, 1, READERS, count, peer, NOT_TAKEN, value)
awake:      peer = 1;
            do
            :: peer < RANKS -> awaited[PAIR(0, peer)] = false; peer++
            :: else -> break
            od
#endif
        od;
        slot[piece % SLOTS] = 0; /* triton_kernels/cpu/pull.py send_kernel */
#ifdef BROKEN_EARLY_LINE
        lines[1] = piece;
#endif
        slot[piece % SLOTS] = piece;
        peer = 1;
        do
        :: peer < RANKS -> lines[peer] = piece; peer++
        :: else -> break
        od;
        peer = 1;
        do
        :: peer < RANKS -> wake(0, peer); peer++
        :: else -> break
        od;
        piece++
    :: else -> break
    od
#ifdef GOAL_END
    ;
    taken[1] == PIECES && taken[READERS] == PIECES;
    goal_reached = true;
    assert(!(goal_reached))
#endif
}

proctype reader(byte me) {
    byte piece = 1, peer, count;
    short value;
    bool late[RANKS];
    do
    :: piece <= PIECES ->
        do
        :: NO_LINE(0) ->
            SLEEP_ON(me, 0, 0, count, peer, NO_LINE, value)
awake:      awaited[PAIR(me, 0)] = false
        :: else -> break
        od;
#ifdef BROKEN_EARLY_TAKE
        taken[me] = piece;
#endif
        assert(slot[piece % SLOTS] == piece); /* triton_kernels/cpu/pull.py take_kernel */
        taken[me] = piece;
        wake(me, 0);
        piece++
    :: else -> break
    od
}

init {
    byte one = 1;
    atomic {
        do
        :: one <= READERS -> run reader(one); one++
        :: else -> break
        od
    }
}
