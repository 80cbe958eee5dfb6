/* How long deadlines and grace times must be: the protocol of blame.pml for one round, with a clock.
 *
 * Time stands still while any rank can do something; then it goes on by one. A live rank takes up to LAG to come to a
 * phase, a wait ends after TIMEOUT, and a rank that gives up waits GRACE for the others to answer. Rank RANKS - 1 dies
 * at any moment, also between two of its signals. Claimed is that everyone who gives up names it and nobody else. That
 * needs
 *
 *     2 * LAG < TIMEOUT + GRACE
 *
 * because a rank that leaves its wait when a peer reports may wait for one that is still on its way to the next phase:
 * the peer began to wait up to LAG before the last one came to its phase, which comes to the next one up to LAG later.
 *
 * Parameters: RANKS (3 or 4), LAG, TIMEOUT, GRACE, LANES (1: a dispatch and a combine; 2: dispatches on two lanes,
 * then a combine on the first), PATIENT (who leaves early keeps what is left of its own time before its grace begins;
 * the kernels do not). BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state
 * that the search must reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 4
#endif
#ifndef LAG
#define LAG 2
#endif
#ifndef TIMEOUT
#define TIMEOUT 4
#endif
#ifndef GRACE
#define GRACE 1
#endif
#ifndef LANES
#define LANES 1
#endif
#define PHASES (LANES + 1)
#define VICTIM (RANKS - 1)

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define FLAG(phase, rank, source) flag[(phase) * RANKS * RANKS + AT(rank, source)]
#define STUCK(lane, rank, source) stuck[(lane) * RANKS * RANKS + AT(rank, source)]
#define LANE (phase % LANES)

#define SIGNALLED(peer) FLAG(phase, rank, peer)
#define SILENT(peer) (!STUCK(LANE, rank, peer) && !SIGNALLED(peer))
#define A ((rank + 1) % RANKS)
#define B ((rank + 2) % RANKS)
#if RANKS > 3
#define C ((rank + 3) % RANKS)
#else
#define C B
#endif
#define ALL_SIGNALLED (SIGNALLED(A) && SIGNALLED(B) && SIGNALLED(C))
#define ANY_STUCK (STUCK(LANE, rank, A) || STUCK(LANE, rank, B) || STUCK(LANE, rank, C))
#define ANY_SILENT (SILENT(A) || SILENT(B) || SILENT(C))

bit flag[PHASES * RANKS * RANKS];
bit stuck[LANES * RANKS * RANKS];
byte left[RANKS + 1]; /* time until a rank's next event; at the end, until the death */
bool dead;
#define TIME_IS_LEFT (left[0] + left[1] + left[2] + left[3] + left[RANKS] > 0)

#ifdef GOAL_BLAME
bool goal_reached;
byte gave_up;
#endif

/* A peer that gave up on another lane is not to blame: moe/direct.py _tell_all_lanes looks there afterwards. */
#if LANES == 1 || defined(BROKEN_STUCK_PER_LANE)
#define EXCUSED(peer) false
#else
#define EXCUSED(peer) (STUCK(0, rank, peer) || STUCK(1, rank, peer))
#endif

inline tell(lane) { /* triton_kernels/signal.py give_up: the stuck lines at all peers */
    STUCK(lane, A, rank) = 1;
    STUCK(lane, B, rank) = 1;
    STUCK(lane, C, rank) = 1
}

active [RANKS] proctype stream() {
    byte rank, phase, peer, blamed;
    rank = _pid;
    {
        do
        :: phase < PHASES ->
            atomic { /* whatever a rank does before a phase: other kernels, experts, the host's work */
                select(peer : 0 .. LAG);
                left[rank] = peer;
                peer = 0
            }
            left[rank] == 0;
            FLAG(phase, A, rank) = 1; /* triton_kernels/signal.py publish */
            FLAG(phase, B, rank) = 1;
            FLAG(phase, C, rank) = 1;
            left[rank] = TIMEOUT;
            if /* triton_kernels/signal.py wait_for_all */
            :: ALL_SIGNALLED
            :: !ALL_SIGNALLED && ANY_STUCK -> goto give_up
            :: !ALL_SIGNALLED && left[rank] == 0 -> goto give_up
            fi;
            left[rank] = 0;
            phase++
        :: phase == PHASES -> goto finished
        od;
give_up: /* triton_kernels/signal.py give_up */
        tell(LANE);
#ifdef PATIENT
        left[rank] = left[rank] + GRACE;
#else
        left[rank] = GRACE;
#endif
        !ANY_SILENT || left[rank] == 0;
        d_step {
            for (peer : 0 .. RANKS - 1) {
                if
                :: peer != rank && SILENT(peer) && !EXCUSED(peer) -> blamed = blamed | (1 << peer)
                :: else
                fi
            };
            assert(blamed == 1 << VICTIM);
#ifdef GOAL_BLAME
            gave_up++;
            goal_reached = gave_up == RANKS - 1;
            assert(!goal_reached); /* that all survivors give up */
#endif
            blamed = 0;
            peer = 0;
            left[rank] = 0
        };
#if LANES > 1
        tell(1 - LANE); /* moe/direct.py _tell_all_lanes */
#endif
finished: skip
    } unless { dead && rank == VICTIM }
}

active proctype death() {
    byte when;
    atomic {
        select(when : 0 .. PHASES * LAG);
        left[RANKS] = when;
        when = 0
    }
    left[RANKS] == 0;
    d_step { dead = true; left[VICTIM] = 0 }
}

active proctype clock() {
    byte timer;
    do
    :: timeout && TIME_IS_LEFT ->
        d_step {
            for (timer : 0 .. RANKS) {
                left[timer] = (left[timer] > 0 -> left[timer] - 1 : 0)
            };
            timer = 0
        }
    :: timeout && !TIME_IS_LEFT -> break
    od
}
