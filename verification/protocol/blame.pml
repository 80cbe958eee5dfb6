/* Waits that end, and whom they blame: a rank dies at any step, also between two of its signals.
 *
 * Only signals are modelled, on one lane; round_trip.pml has what they publish_header. After a rank has given up, its next
 * call raises, so it makes no more of them.
 *
 * Time is not modelled by a clock but by what it is longer than. A deadline or a grace time that is LONG ends only
 * when no rank can do anything else (Promela's `timeout`): every rank that lives waits, has given up or has finished.
 * So a long deadline means that live ranks keep up with each other, and a long grace time that a live rank comes to
 * its next wait, and looks, before it is over. Otherwise it may end at any moment.
 *
 * Parameters: RANKS (3 or 4), EPOCHS, DEATHS (0, 1 or 2 ranks die, or fewer), ANY_DEADLINE (deadlines may be too
 * short), ANY_GRACE (grace times may be too short), CHAIN (a phase is a step of a collective in pieces, where a rank
 * waits only for those that it exchanges pieces with). What is claimed of a rank that gave up: it names exactly the
 * dead (by default); nobody that lives (NO_INNOCENTS). BROKEN_...: the protocol with one rule broken; the search must
 * find an error. GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define DISPATCH 0
#define COMBINE 1
#define FLAG(phase, rank, source) flag[(phase) * RANKS * RANKS + AT(rank, source)]

byte flag[2 * RANKS * RANKS]; /* the epoch that was last signalled */
bit stuck[RANKS * RANKS]; /* the flag of a stuck line */
byte dead; /* the set of ranks that died */

#define HAS(ranks, rank) (((ranks) >> (rank)) & 1)

#ifdef CHAIN
#define NEEDS(peer) (rank + (peer) != 2) /* ranks 0 and 2 have nothing for each other */
#else
#define NEEDS(peer) true
#endif
/* triton_kernels/signal.py wait_for_all */
#define SIGNALLED(phase, peer) (!NEEDS(peer) || FLAG(phase, rank, peer) >= epoch)
/* triton_kernels/signal.py give_up: a peer that neither signalled nor said that it is stuck */
#define SILENT(phase, peer) (!stuck[AT(rank, peer)] && !SIGNALLED(phase, peer))

#define NEXT_TO(step) ((rank + (step)) % RANKS)
#if RANKS == 3
#define ALL_SIGNALLED(phase) (SIGNALLED(phase, NEXT_TO(1)) && SIGNALLED(phase, NEXT_TO(2)))
#define ANY_SILENT(phase) (SILENT(phase, NEXT_TO(1)) || SILENT(phase, NEXT_TO(2)))
#define SOMEONE_IS_STUCK (stuck[AT(rank, NEXT_TO(1))] || stuck[AT(rank, NEXT_TO(2))])
#else
#define ALL_SIGNALLED(phase) \
    (SIGNALLED(phase, NEXT_TO(1)) && SIGNALLED(phase, NEXT_TO(2)) && SIGNALLED(phase, NEXT_TO(3)))
#define ANY_SILENT(phase) \
    (SILENT(phase, NEXT_TO(1)) || SILENT(phase, NEXT_TO(2)) || SILENT(phase, NEXT_TO(3)))
#define SOMEONE_IS_STUCK \
    (stuck[AT(rank, NEXT_TO(1))] || stuck[AT(rank, NEXT_TO(2))] || stuck[AT(rank, NEXT_TO(3))])
#endif

#ifdef ANY_DEADLINE
#define DEADLINE true
#else
#define DEADLINE timeout
#endif
#ifdef ANY_GRACE
#define GRACE true
#else
#define GRACE timeout
#endif

#if defined(GOAL_BETWEEN_SIGNALS) || defined(GOAL_FINISH_AND_BLAME)
bool goal_reached;
byte finished, gave_up[2]; /* ranks that finished, and that gave up in each phase */
#endif

/* triton_kernels/signal.py publish */
inline publish(phase) {
    FLAG(phase, NEXT_TO(1), rank) = epoch;
    FLAG(phase, NEXT_TO(2), rank) = epoch;
#if RANKS > 3
    FLAG(phase, NEXT_TO(3), rank) = epoch
#endif
}

inline tell(peer) { /* triton_kernels/signal.py give_up: words of the stuck line, then its flag */
    stuck[AT(peer, rank)] = 1
}

inline blame_silent(phase) {
    for (peer : 0 .. RANKS - 1) {
        if
#ifdef BROKEN_NO_GRACE
        :: peer != rank && !SIGNALLED(phase, peer) -> blamed = blamed | (1 << peer)
#else
        :: peer != rank && SILENT(phase, peer) -> blamed = blamed | (1 << peer)
#endif
        :: else
        fi
    };
    peer = 0
}

/* triton_kernels/signal.py give_up */
inline give_up(phase) {
#ifndef BROKEN_NO_GRACE
    tell(NEXT_TO(1)); /* triton_kernels/signal.py give_up */
    tell(NEXT_TO(2));
#if RANKS > 3
    tell(NEXT_TO(3));
#endif
    if
    :: !ANY_SILENT(phase) /* triton_kernels/signal.py give_up: nobody is left to wait for */
    :: GRACE /* triton_kernels/signal.py give_up: the grace time is over */
    fi;
#endif
    d_step { /* triton_kernels/signal.py give_up: the report's words; triton_kernels/signal.py poison */
        blame_silent(phase);
#ifdef NO_INNOCENTS
        assert((blamed & ~dead) == 0);
#else
        assert(blamed == dead);
#endif
#ifdef GOAL_BETWEEN_SIGNALS
        gave_up[phase]++;
        goal_reached = gave_up[DISPATCH] > 0 && gave_up[COMBINE] > 0;
        assert(!goal_reached); /* that the dead rank's last signal reached some peers and not others */
#endif
#ifdef GOAL_FINISH_AND_BLAME
        goal_reached = finished > 0;
        assert(!goal_reached); /* that one rank got all of the dead rank's signals and another did not */
#endif
        blamed = 0
    };
    goto raised
}

/* triton_kernels/signal.py wait_for_all: the clock and the reports are read before the flags. */
inline look_again(phase) {
    if
    :: ALL_SIGNALLED(phase)
    :: else -> give_up(phase)
    fi
}

/* triton_kernels/dispatch.py wait: triton_kernels/signal.py wait_for_all */
inline wait(phase) {
    if
    :: ALL_SIGNALLED(phase)
#ifndef BROKEN_DEAF
    :: SOMEONE_IS_STUCK -> /* triton_kernels/signal.py wait_for_all */
        look_again(phase)
#endif
    :: !ALL_SIGNALLED(phase) && DEADLINE -> /* triton_kernels/signal.py wait_for_all: time is up */
        look_again(phase)
    fi
}

active [RANKS] proctype stream() {
    byte rank, peer, blamed, epoch;
    d_step { rank = _pid; epoch = 1 }
    {
        do
        :: epoch <= EPOCHS ->
            publish(DISPATCH); /* triton_kernels/dispatch.py send_tokens */
            wait(DISPATCH);
            publish(COMBINE); /* triton_kernels/combine.py send_sums */
            wait(COMBINE);
            epoch++
        :: epoch > EPOCHS -> break
        od;
#ifdef GOAL_FINISH_AND_BLAME
        finished++;
#endif
raised: skip
    } unless { HAS(dead, rank) }
}

active proctype death() { /* at any moment; or never, which is decided at any moment too */
    byte victim, deaths;
    do
    :: deaths < DEATHS ->
        atomic {
            select(victim : 0 .. RANKS - 1);
            if
            :: !HAS(dead, victim) -> dead = dead | (1 << victim); deaths++
            :: true -> break
            fi
        }
    :: deaths == DEATHS -> break
    od
}
