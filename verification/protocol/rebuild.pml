/* Rebuilding after a timeout, while a peer that was given up may still write.
 *
 * Rank 2 may stop at any step for as long as it likes, and the others may lose patience at any moment. They then
 * rebuild: new memory, a new generation, epochs from the beginning. In the place of rank 2 a new process joins the new
 * generation, and the old one may wake up at any time and do the rest of its stores, signals and waits. Or the old
 * process joins, once its own calls have ended (REJOINS). A memory cell holds the generation and the epoch in which it
 * was last written, so a read of what another generation wrote shows.
 *
 * Parameters: REJOINS. BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state
 * that the search must reach, written as an assertion that it does not.
 */

#define RANKS 3
#define LATE 2

#ifdef BROKEN_SAME_MEMORY
#define MEMORY 0
#else
#define MEMORY generation
#endif
#define AT(rank, source) ((MEMORY * RANKS + (rank)) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define CELLS (2 * RANKS * RANKS)
#define DISPATCH 0
#define COMBINE 1
#define FLAG(phase, rank, source) flag[(phase) * CELLS + AT(rank, source)]
#define STAMP (4 * generation + epoch)
#define NEVER 255

byte flag[2 * CELLS]; /* the epoch that was last signalled */
byte record_first[CELLS] = NEVER;
byte record_second[CELLS] = NEVER;
bit stuck[CELLS];

byte came_to_rebuild, memory_is_ready; /* processes of the new generation: the host's exchange of addresses */
byte rebuilt; /* those that finished a round in the new generation */

#ifdef GOAL_WRITES_LATE
bool goal_reached;
#endif

#define RIGHT ((rank + 1) % RANKS)
#define LEFT ((rank + 2) % RANKS)
#define ALL_SIGNALLED(phase) (FLAG(phase, rank, RIGHT) >= epoch && FLAG(phase, rank, LEFT) >= epoch)

inline store_record(peer) { /* triton_kernels/dispatch.py send_tokens: payload and scales, in either order */
    if
    :: record_first[AT(peer, rank)] = STAMP; record_second[AT(peer, rank)] = STAMP
    :: record_second[AT(peer, rank)] = STAMP; record_first[AT(peer, rank)] = STAMP
    fi
}

/* triton_kernels/signal.py publish */
inline publish(phase) {
    FLAG(phase, RIGHT, rank) = epoch;
    FLAG(phase, LEFT, rank) = epoch
}

inline report_stuck() { /* triton_kernels/signal.py give_up: the stuck lines */
    stuck[AT(RIGHT, rank)] = 1;
    stuck[AT(LEFT, rank)] = 1
}

inline wait(phase) { /* triton_kernels/dispatch.py wait */
    ALL_SIGNALLED(phase)
}

/* triton_kernels/dispatch.py wait. In the first generation a rank may give up at any moment: whether that is because its
 * time is up or because a peer is stuck (triton_kernels/signal.py wait_for_all) makes no difference here. */
inline wait_or_give_up(phase) {
    if
    :: ALL_SIGNALLED(phase)
    :: true -> report_stuck(); goto given_up
    fi
}

inline send_tokens() { /* triton_kernels/dispatch.py send_tokens; triton_kernels/dispatch.py send_tokens_kernel */
    epoch++;
    store_record(RIGHT);
    store_record(LEFT);
#ifdef GOAL_WRITES_LATE
    atomic {
        goal_reached = generation == 0 && rebuilt > 0;
        assert(!goal_reached) /* that a process of the old generation has stored after the new one is at work */
    };
#endif
    publish(DISPATCH)
}

inline gather() { /* triton_kernels/permute.py gather */
    d_step {
        assert(record_first[AT(rank, RIGHT)] == STAMP);
        assert(record_second[AT(rank, RIGHT)] == STAMP);
        assert(record_first[AT(rank, LEFT)] == STAMP);
        assert(record_second[AT(rank, LEFT)] == STAMP)
    }
}

inline send_sums() { /* triton_kernels/combine.py send_sums, of which only the signal matters here */
    publish(COMBINE)
}

inline round() {
    send_tokens();
    wait(DISPATCH);
    gather();
    send_sums();
    wait(COMBINE)
}

inline rebuild() { /* moe/parallel.py rebuild */
    atomic { generation = 1; epoch = 0; came_to_rebuild++ }
    came_to_rebuild == RANKS;
#ifdef BROKEN_SAME_MEMORY /* the owner clears its memory and uses it again */
    atomic {
        for (cell : 0 .. RANKS - 1) {
            FLAG(DISPATCH, rank, cell) = 0;
            FLAG(COMBINE, rank, cell) = 0;
            stuck[AT(rank, cell)] = 0;
            record_first[AT(rank, cell)] = NEVER;
            record_second[AT(rank, cell)] = NEVER
        };
        cell = 0
    }
#endif
    memory_is_ready++;
    memory_is_ready == RANKS
}

active [RANKS] proctype first_process() { /* of each rank */
    byte rank, epoch, generation, cell;
    rank = _pid;
    send_tokens();
    wait_or_give_up(DISPATCH);
    gather();
    send_sums();
    wait_or_give_up(COMBINE);
given_up:
    if
#ifndef REJOINS
    :: rank == LATE
#endif
    :: else ->
        rebuild();
        round();
        rebuilt++;
        round()
    fi
}

#ifndef REJOINS
active proctype replacement() { /* a new process, in the place of the one that was given up */
    byte rank, epoch, generation, cell;
    rank = LATE;
    rebuild();
    round();
    rebuilt++;
    round()
}
#endif
