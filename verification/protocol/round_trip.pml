/* The round trip of a mixture of experts: dispatch and combine alternate on a lane, over single buffers.
 *
 * Each rank has one token a round and sends it to any set of its peers, none included. Speeds are whatever they are:
 * every interleaving is looked at. A memory cell holds the epoch in which it was last written, so a read that comes
 * too early or too late shows. What a kernel stores into its peers' memory, it stores in several steps: a header, a
 * plane, a record in two halves; a sum in two halves, a word of the combine line. The flags follow, one peer's after
 * the other's.
 *
 * Accesses of one kernel to several ranks that lie between the same two synchronisations are one step. Nothing is lost
 * by that: an access of another rank that is not ordered against one of them may come before all of them or after all.
 *
 * A cell that was read for the last time in a round is marked STALE. The real memory keeps its bytes; the mark spares
 * the search from telling apart rounds that differ only in what nobody may read any more.
 *
 * Epochs have three bits and begin at 6, so they wrap between the second round and the third.
 *
 * Parameters: RANKS (2 or 3), EPOCHS, LANES (1 or 2), STREAMS (a stream for each lane, not one for all), ANY_ORDER
 * (stores come in every order), ALL_PEERS (tokens go everywhere), ALWAYS_SUMS (no round is closed without sums).
 * BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state that the search must
 * reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 3
#endif
#ifndef LANES
#define LANES 1
#endif

#define BEFORE_FIRST 5
#define NEXT(epoch) (((epoch) + 1) & 7)
#define REACHED(flag, epoch) ((((flag) - (epoch)) & 7) < 4) /* triton_kernels/signal.py wait_for_all, with three bits */

#define NEVER 15 /* written in no epoch */
#define STALE 14 /* read for the last time */

#define CELLS (LANES * RANKS * RANKS)
#define AT(lane, rank, source) (((lane) * RANKS + (rank)) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define SLOT(lane, rank, ordinal) AT(lane, rank, ordinal) /* a sum's: which of the ranks that the token went to */

#define DISPATCH 0
#define COMBINE 1
byte flag[2 * CELLS] = BEFORE_FIRST;
#define FLAG(phase, lane, rank, source) flag[(phase) * CELLS + AT(lane, rank, source)]

byte header[CELLS] = NEVER;
bit num_tokens[CELLS];
byte plane[CELLS] = NEVER;
byte plane_ranks[CELLS]; /* what the ids say: the set of ranks that own the token's experts */
byte record_first[CELLS] = NEVER;
byte record_second[CELLS] = NEVER;
byte combine_line[CELLS] = NEVER;
bit has_sums[CELLS];
byte sum_first[CELLS] = NEVER;
byte sum_second[CELLS] = NEVER;
byte sum_author[CELLS];

#define HAS(ranks, rank) (((ranks) >> (rank)) & 1)
#define ORDINAL(ranks, rank) (((rank) > 0 && HAS(ranks, 0)) + ((rank) > 1 && HAS(ranks, 1)))
#define EVERYONE ((1 << RANKS) - 1)

/* Stores that a kernel has still to do. */
#define HEADER 1
#define PLANE 2
#define RECORD_FIRST 4
#define RECORD_SECOND 8
#define SUM_FIRST 1
#define SUM_SECOND 2
#define COMBINE_LINE 4
#ifdef ANY_ORDER
#define TAKE(cell) (todo & (cell)) -> todo = todo & ~(cell)
#else
#define TAKE(cell) ((todo & (cell)) && (todo & ((cell) - 1)) == 0) -> todo = todo & ~(cell)
#endif

#ifdef STREAMS
#define NUM_STREAMS (RANKS * LANES)
#else
#define NUM_STREAMS RANKS
#endif
byte streams_done;
#if defined(GOAL_END) || defined(GOAL_AHEAD)
bool goal_reached;
bool met_no_peers, met_all_peers, met_closed, met_second; /* kinds of rounds that must have occurred */
byte rounds_routed[RANKS];
#endif

typedef Private { /* what a rank knows of the open round on a lane; nobody else reads it */
    byte epoch;
    byte ranks;  /* where its own token goes */
    byte wanted; /* the sources whose token came here */
    byte second  /* those of them for whose token this rank is the second in ascending order */
}

#ifdef BROKEN_CLEARED_FLAG
bit shared_flag[CELLS]; /* one word for both phases, which its writer sets and its reader clears */
#define SET(phase, lane, peer) shared_flag[AT(lane, peer, rank)] = 1
#define LOOK(phase, lane, peer, awaited) \
    d_step { shared_flag[AT(lane, rank, peer)] -> shared_flag[AT(lane, rank, peer)] = 0 }
#else
#define SET(phase, lane, peer) FLAG(phase, lane, peer, rank) = my[lane].epoch
#define LOOK(phase, lane, peer, awaited) !HAS(awaited, peer) || REACHED(FLAG(phase, lane, rank, peer), my[lane].epoch)
#endif

/* triton_kernels/signal.py publish: one flag after the other, the right-hand neighbour's first. The one instruction of
 * triton_kernels/signal.py publish is several stores as well, to several peers. */
inline publish(phase, lane) {
    SET(phase, lane, (rank + 1) % RANKS);
#if RANKS > 2
    SET(phase, lane, (rank + 2) % RANKS)
#endif
}

/* triton_kernels/dispatch.py wait: triton_kernels/signal.py wait_for_all */
inline wait(phase, lane, awaited) {
    LOOK(phase, lane, (rank + 1) % RANKS, awaited);
#if RANKS > 2
    LOOK(phase, lane, (rank + 2) % RANKS, awaited)
#endif
}

/* Stores of a dispatch, each to all peers that get it. */
inline store_tokens(lane, cells) {
    todo = cells;
    do
    :: d_step {
        TAKE(HEADER); /* triton_kernels/dispatch.py send_tokens: n_tokens and dtype, behind the flag of the dispatch line */
        for (peer : 0 .. RANKS - 1) {
            num_tokens[AT(lane, peer, rank)] = (my[lane].ranks != 0);
            header[AT(lane, peer, rank)] = my[lane].epoch
        };
        peer = 0 }
    :: d_step {
        TAKE(PLANE); /* triton_kernels/dispatch.py send_tokens: merged ids and weights at [my rank][token] */
        for (peer : 0 .. RANKS - 1) {
            plane_ranks[AT(lane, peer, rank)] = my[lane].ranks;
            plane[AT(lane, peer, rank)] = my[lane].epoch
        };
        peer = 0 }
    :: d_step {
        TAKE(RECORD_FIRST); /* triton_kernels/dispatch.py send_tokens: payload, to the ranks that own an expert of it */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].ranks, peer) -> record_first[AT(lane, peer, rank)] = my[lane].epoch
            :: else
            fi
        };
        peer = 0 }
    :: d_step {
        TAKE(RECORD_SECOND); /* triton_kernels/dispatch.py send_tokens: scales */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].ranks, peer) -> record_second[AT(lane, peer, rank)] = my[lane].epoch
            :: else
            fi
        };
        peer = 0 }
    :: todo == 0 -> break
    od
}

inline choose_peers(lane) {
#ifdef ALL_PEERS
    my[lane].ranks = EVERYONE - (1 << rank);
#else
    do
    :: peer < RANKS && peer != rank -> my[lane].ranks = my[lane].ranks | (1 << peer); peer++
    :: peer < RANKS -> peer++
    :: peer == RANKS -> peer = 0; break
    od;
#endif
#if defined(GOAL_END)
    met_no_peers = met_no_peers || my[lane].ranks == 0;
    met_all_peers = met_all_peers || my[lane].ranks == EVERYONE - (1 << rank);
#endif
}

inline send_tokens(lane) {
    atomic { /* triton_kernels/dispatch.py send_tokens: the next epoch; the router chose any set of peers */
        my[lane].epoch = NEXT(my[lane].epoch);
        choose_peers(lane)
    }
#ifdef BROKEN_EARLY_SIGNAL
    store_tokens(lane, HEADER | PLANE | RECORD_FIRST);
    publish(DISPATCH, lane);
    store_tokens(lane, RECORD_SECOND)
#else
    store_tokens(lane, HEADER | PLANE | RECORD_FIRST | RECORD_SECOND);
    publish(DISPATCH, lane) /* triton_kernels/dispatch.py send_tokens; triton_kernels/dispatch.py send_tokens_kernel */
#endif
}

inline dispatch(lane) {
    send_tokens(lane);
    wait(DISPATCH, lane, EVERYONE); /* triton_kernels/dispatch.py wait */
    d_step { /* triton_kernels/permute.py route: headers and planes of all sources */
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer == rank
#ifdef BROKEN_NO_HEADER
            :: peer != rank && record_first[AT(lane, rank, peer)] != NEVER ->
                my[lane].wanted = my[lane].wanted | (1 << peer)
            :: else
#else
            :: else ->
                assert(header[AT(lane, rank, peer)] == my[lane].epoch);
                if
                :: num_tokens[AT(lane, rank, peer)] ->
                    assert(plane[AT(lane, rank, peer)] == my[lane].epoch);
                    my[lane].wanted = my[lane].wanted | (HAS(plane_ranks[AT(lane, rank, peer)], rank) << peer)
                :: else
                fi
#endif
            fi
        };
#ifdef GOAL_AHEAD
        rounds_routed[rank]++;
#endif
        peer = 0
    }
    d_step { /* triton_kernels/permute.py gather: the records of the wanted slots */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].wanted, peer) ->
                assert(record_first[AT(lane, rank, peer)] == my[lane].epoch);
                assert(record_second[AT(lane, rank, peer)] == my[lane].epoch)
            :: else
            fi
        };
        peer = 0
    }
}

/* What this rank has read for the last time: before it signals the combine, and at the end of a round. Part of the step
 * that reads it, and not of the protocol. */
inline forget_dispatch(lane) {
    for (peer : 0 .. RANKS - 1) {
        header[AT(lane, rank, peer)] = STALE;
        num_tokens[AT(lane, rank, peer)] = 0;
        plane[AT(lane, rank, peer)] = STALE;
        plane_ranks[AT(lane, rank, peer)] = 0;
#ifndef BROKEN_NO_HEADER /* which looks for slots that were written at some time */
        record_first[AT(lane, rank, peer)] = STALE;
        record_second[AT(lane, rank, peer)] = STALE
#endif
    };
    peer = 0
}

inline forget_combine(lane) {
    for (peer : 0 .. RANKS - 1) {
        combine_line[AT(lane, rank, peer)] = STALE;
        has_sums[AT(lane, rank, peer)] = 0;
        sum_first[SLOT(lane, rank, peer)] = STALE;
        sum_second[SLOT(lane, rank, peer)] = STALE;
        sum_author[SLOT(lane, rank, peer)] = 0
    };
    my[lane].ranks = 0;
    my[lane].wanted = 0;
    my[lane].second = 0;
    todo = 0;
    peer = 0
}

inline store_has_sums(lane, value) {
    for (peer : 0 .. RANKS - 1) {
        has_sums[AT(lane, peer, rank)] = value;
        combine_line[AT(lane, peer, rank)] = my[lane].epoch
    };
    peer = 0
}

inline send_sums(lane) {
    d_step { /* triton_kernels/combine.py send_sums: reads the ids planes once more, for this rank's ordinal */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].wanted, peer) ->
#ifndef BROKEN_NO_HEADER
                assert(plane[AT(lane, rank, peer)] == my[lane].epoch);
#endif
                my[lane].second = my[lane].second | (ORDINAL(plane_ranks[AT(lane, rank, peer)], rank) << peer)
            :: else
            fi
        };
#ifdef GOAL_END
        met_second = met_second || my[lane].second != 0;
#endif
        forget_dispatch(lane);
        todo = SUM_FIRST | SUM_SECOND | COMBINE_LINE
    }
    do
    :: d_step {
        TAKE(SUM_FIRST); /* triton_kernels/combine.py send_sums: payload */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].wanted, peer) ->
                sum_author[SLOT(lane, peer, HAS(my[lane].second, peer))] = rank;
                sum_first[SLOT(lane, peer, HAS(my[lane].second, peer))] = my[lane].epoch
            :: else
            fi
        };
        peer = 0 }
    :: d_step {
        TAKE(SUM_SECOND); /* triton_kernels/combine.py send_sums: scales */
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(my[lane].wanted, peer) -> sum_second[SLOT(lane, peer, HAS(my[lane].second, peer))] = my[lane].epoch
            :: else
            fi
        };
        peer = 0 }
    :: d_step {
        TAKE(COMBINE_LINE); /* triton_kernels/combine.py send_sums: SIGNAL_END = 1 at every peer */
        store_has_sums(lane, 1) }
    :: todo == 0 -> break
    od;
#ifdef GOAL_AHEAD
    atomic {
        for (peer : 0 .. RANKS - 1) {
            goal_reached = goal_reached || rounds_routed[peer] < rounds_routed[rank]
        };
        assert(!goal_reached); /* that a rank signals a combine before a peer has read the dispatch */
        peer = 0
    }
#endif
    publish(COMBINE, lane) /* triton_kernels/combine.py send_sums; triton_kernels/combine.py send_sums_kernel */
}

inline close_round(lane) {
    d_step { /* triton_kernels/dispatch.py close_round: SIGNAL_END = 0 at every peer */
#ifdef GOAL_END
        met_closed = true;
#endif
        forget_dispatch(lane);
        store_has_sums(lane, 0)
    }
    publish(COMBINE, lane) /* triton_kernels/dispatch.py close_round; triton_kernels/dispatch.py close_round_kernel */
}

inline combine(lane) {
    if
#ifdef BROKEN_DISPATCH_TWICE
    :: true -> forget_combine(lane) /* the next dispatch follows at once */
#else
    :: true ->
        send_sums(lane);
#ifdef BROKEN_FEWER_AWAITED
        wait(COMBINE, lane, my[lane].ranks);
#else
        wait(COMBINE, lane, EVERYONE); /* triton_kernels/dispatch.py wait */
#endif
        d_step { /* triton_kernels/combine.py sum_home; triton_kernels/combine.py sum_home_kernel: where a rank has sums */
            for (peer : 0 .. RANKS - 1) {
                if
                :: HAS(my[lane].ranks, peer) ->
                    todo = ORDINAL(my[lane].ranks, peer);
                    assert(combine_line[AT(lane, rank, peer)] == my[lane].epoch);
                    if
#ifndef BROKEN_CLOSED_SUMS
                    :: !has_sums[AT(lane, rank, peer)]
#endif
                    :: else ->
                        assert(sum_first[SLOT(lane, rank, todo)] == my[lane].epoch);
                        assert(sum_second[SLOT(lane, rank, todo)] == my[lane].epoch);
                        assert(sum_author[SLOT(lane, rank, todo)] == peer)
                    fi
                :: else
                fi
            };
            forget_combine(lane)
        }
#ifndef ALWAYS_SUMS
    :: true ->
        close_round(lane);
#ifndef BROKEN_CLOSE_WITHOUT_WAIT
        wait(COMBINE, lane, EVERYONE); /* triton_kernels/dispatch.py wait */
#endif
        d_step { forget_combine(lane) }
#endif
#endif
    fi
}

inline begin() {
    d_step {
        rank = _pid % RANKS;
        for (peer : 0 .. LANES - 1) {
            my[peer].epoch = BEFORE_FIRST
        };
        peer = 0
    }
}

inline end() {
    d_step {
        streams_done++;
#ifdef GOAL_END
#ifndef ALWAYS_SUMS
        goal_reached = met_closed &&
#else
        goal_reached =
#endif
            streams_done == NUM_STREAMS && met_no_peers && met_all_peers && (met_second || RANKS == 2);
        assert(!goal_reached)
#endif
    }
}

#ifdef STREAMS
active [NUM_STREAMS] proctype stream() { /* a stream, or a CPU's thread, for each lane of a rank */
    Private my[LANES];
    byte rank, peer, todo, rounds;
    begin();
    do
    :: rounds < EPOCHS -> dispatch(_pid / RANKS); combine(_pid / RANKS); rounds++
    :: rounds == EPOCHS -> break
    od;
    end()
}
#else
active [NUM_STREAMS] proctype stream() { /* the one stream, or the one thread, of a rank */
    Private my[LANES];
    byte rank, peer, todo, rounds;
    begin();
    do
    :: rounds < EPOCHS ->
#if LANES == 1
        dispatch(0);
        combine(0);
#else
        if
#ifdef BROKEN_LANES_CROSSED
        :: rank == 0 -> dispatch(1); dispatch(0); combine(1); combine(0)
#endif
        :: else -> dispatch(0); dispatch(1); combine(0); combine(1)
        fi;
#endif
        rounds++
    :: rounds == EPOCHS -> break
    od;
    end()
}
#endif
