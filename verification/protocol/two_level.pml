/* Rounds over two levels: rows cross once from host to host, and within a host ranks store into each other's memory.
 *
 * Every rank has a token for every rank. It posts a message to its forwarder on the other host, and waits for nothing.
 * It stores its own slots within its host, then its dispatch lines. It waits for the messages of the ranks that it
 * serves, and for each of them stores slots and then lines, in its name. It waits for the lines of all ranks, reads all
 * slots, and stores sums: those for a rank of the other host into the home that the rank's forwarder keeps for it. Its
 * combine lines follow, and those of the ranks that it serves. It waits for the combine lines of all ranks, reads the
 * homes that it keeps, posts the sums of those that it serves, and waits for its own.
 *
 * A cell holds the epoch in which it was last written, so a read that comes too early or too late shows. What a kernel
 * stores before one flag, it stores in one step: nobody may look before the flag, whatever the order was. The flags
 * follow, one peer's after the other's; a rank's own comes with the first of them, as nobody else looks there. Flags
 * only advance, so a wait for all of them is one look. Messages of a pair stay in order and are taken at any time
 * later. A post never waits.
 *
 * A cell that was read for the last time in a round is marked STALE. The real memory keeps its bytes; the mark spares
 * the search from telling apart rounds that differ only in what nobody may read any more.
 *
 * Epochs have three bits and begin at 6, so they wrap between the second round and the third.
 *
 * Parameters: EPOCHS, UNEVEN (hosts of 1 and 3 ranks, not of 2 and 2: rank 0 serves three ranks, rank 1 one, and the
 * others none), CLOSES (any rank may close any round without sums), COUNTS (a dispatch begins with counts that all
 * ranks exchange), TWICE (the first message of rank 0 comes twice), PARTS (sums for the other host go as soon as all of
 * this host have stored them, before those for this host). BROKEN_...: the protocol with one rule broken; the search
 * must find an error. GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifndef EPOCHS
#define EPOCHS 3
#endif

#define RANKS 4
#define BEFORE_FIRST 5
#define NEXT(epoch) (((epoch) + 1) & 7)
#define REACHED(flag, epoch) ((((flag) - (epoch)) & 7) < 2) /* triton_kernels/cpu/signal.py signalled, with three bits */
#define NEVER 15 /* written in no epoch */
#define STALE 14 /* read for the last time */

/* comm/hosts.py forwarder */
#ifdef UNEVEN
#define HOST(rank) ((rank) > 0)
#define FORWARDER(source, host) ((host) * ((source) + ((source) == 0)))
#define NEXT_MEMBER(rank) (((rank) > 0) * ((rank) % 3 + 1))
#define NET(from, to) (((from) == 0) * (3 + (to)) + (from) - 1)
#define NETS 6
#else
#define HOST(rank) ((rank) / 2)
#define FORWARDER(source, host) ((source) % 2 + 2 * (host))
#define NEXT_MEMBER(rank) ((rank) ^ 1)
#define NET(from, to) (from)
#define NETS 4
#endif
#define AWAY(source) FORWARDER(source, 1 - HOST(source)) /* who serves a rank on the other host */
#define SERVES(rank, source) (HOST(source) != HOST(rank) && AWAY(source) == (rank))

#define CELLS (RANKS * RANKS)
#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, in the name of `source` */
#define HOME(source, writer) ((source) * RANKS + (writer)) /* lies at the source's forwarder on the writer's host */
#define KEEPS(rank, source) (FORWARDER(source, HOST(rank)) == (rank))

#define DISPATCH 0
#define COMBINE 1
#define PART 2 /* that the sums for the other host are there, with PARTS */
#ifdef PARTS
byte flag[3 * CELLS] = BEFORE_FIRST;
#define THERE(source) (HOST(source) != HOST(rank) || REACHED(FLAG(PART, rank, source), epoch))
#else
byte flag[2 * CELLS] = BEFORE_FIRST;
#endif
#define FLAG(phase, rank, source) flag[(phase) * CELLS + AT(rank, source)]
byte slot[CELLS] = NEVER;
byte line_word[CELLS] = NEVER; /* of a combine line, */
bit has_sums[CELLS];           /* and what it says */
byte home[CELLS] = NEVER;

chan net[NETS] = [4] of { bit, byte }; /* phase and epoch; full only if some rank is ahead of its pair */
#ifdef COUNTS
byte counted[RANKS] = BEFORE_FIRST;
#endif

byte ranks_done;
#if defined(GOAL_END) || defined(GOAL_AHEAD)
bool goal_reached;
#ifdef CLOSES
bool met_closed, met_sums;
#endif
#endif

inline post(to, phase) { /* fused/staged.py post */
    assert(nfull(net[NET(rank, to)]));
    net[NET(rank, to)] ! phase, epoch
}

/* comm/exchange.py _message_tag: a message's tag has its place in the sequence of its pair, and another is not taken. */
inline take(from, phase) {
#ifdef BROKEN_NO_SEQUENCE
    net[NET(from, rank)] ? _, came
#else
    net[NET(from, rank)] ? phase, eval(epoch);
    came = epoch
#endif
}

inline publish(phase, source) { /* triton_kernels/cpu/signal.py publish */
    d_step {
        FLAG(phase, rank, source) = epoch;
        FLAG(phase, NEXT_MEMBER(rank), source) = epoch
    }
#ifdef UNEVEN
    ; FLAG(phase, NEXT_MEMBER(NEXT_MEMBER(rank)), source) = epoch
#endif
}

#define ARRIVED(phase, source) REACHED(FLAG(phase, rank, source), epoch)
inline wait(phase) { /* triton_kernels/cpu/dispatch.py wait */
    ARRIVED(phase, 0) && ARRIVED(phase, 1) && ARRIVED(phase, 2) && ARRIVED(phase, 3)
}

inline store_slots(source, value) { /* triton_kernels/cpu/dispatch.py send_tokens: planes, records and words of the line */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: HOST(peer) == HOST(rank) -> slot[AT(peer, source)] = value
            :: else
            fi
        };
        peer = 0
    }
}

inline forward() { /* moe/two_level.py _forward: each message as it comes, whose last piece is signalled */
    source = 0;
    do
    :: source < RANKS && SERVES(rank, source) ->
        take(source, DISPATCH);
#ifdef BROKEN_EARLY_LINE
        publish(DISPATCH, source);
        store_slots(source, came);
#else
        store_slots(source, came);
        publish(DISPATCH, source);
#endif
        source++
    :: source < RANKS && !SERVES(rank, source) -> source++
    :: source == RANKS -> source = 0; came = 0; break
    od
}

inline read_slots(after) {
    d_step {
        for (peer : 0 .. RANKS - 1) {
            assert(slot[AT(rank, peer)] == epoch);
            slot[AT(rank, peer)] = after
        };
        peer = 0
    }
}

inline dispatch() { /* moe/two_level.py begin: up to the first wait; then what it returns */
    epoch = NEXT(epoch);
#ifdef COUNTS
    counted[rank] = epoch; /* comm/host_collectives.py exchange_counts */
    REACHED(counted[0], epoch) && REACHED(counted[1], epoch) && REACHED(counted[2], epoch) && REACHED(counted[3], epoch);
#endif
    post(AWAY(rank), DISPATCH);
#ifdef TWICE
    if
    :: rank == 0 && rounds == 0 -> post(AWAY(rank), DISPATCH)
    :: else
    fi;
#endif
    store_slots(rank, epoch);
    publish(DISPATCH, rank);
#ifdef BROKEN_LATE_FORWARD
    wait(DISPATCH);
    forward();
#else
    forward();
    wait(DISPATCH);
#endif
    read_slots(epoch) /* triton_kernels/cpu/permute.py route; triton_kernels/cpu/permute.py gather */
}

inline store_sums(first, last) { /* triton_kernels/cpu/combine.py store_sums: into homes on this host, for some ranks */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: (first) <= HOST(peer) && HOST(peer) <= (last) ->
                home[HOME(peer, rank)] = (sums -> epoch : home[HOME(peer, rank)])
            :: else
            fi
        };
        peer = 0
    }
}

inline tell_word(source, sums) { /* how the round ends, in a name */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            if
            :: HOST(peer) == HOST(rank) -> line_word[AT(peer, source)] = epoch; has_sums[AT(peer, source)] = sums
            :: else
            fi
        };
        peer = 0
    }
}

inline tell_end(source, sums) { /* triton_kernels/cpu/dispatch.py close_round: the word, in each name; then the flags */
    tell_word(source, sums);
    publish(COMBINE, source)
}

inline sum_home(served, own) { /* moe/two_level_sums.py _home_of: for those that this rank serves, and for itself */
    d_step {
        for (source : 0 .. RANKS - 1) {
            for (peer : 0 .. RANKS - 1) {
                if
                :: KEEPS(rank, source) && HOST(peer) == HOST(rank) && (source == rank -> own : served) ->
                    assert(line_word[AT(rank, peer)] == epoch);
                    assert(!has_sums[AT(rank, peer)] || home[HOME(source, peer)] == epoch);
                    home[HOME(source, peer)] = STALE
                :: else
                fi
            }
        };
        for (peer : 0 .. RANKS - 1) {
            if
            :: own -> line_word[AT(rank, peer)] = STALE; has_sums[AT(rank, peer)] = 0
            :: else
            fi
        };
        source = 0;
        peer = 0
    }
}

inline post_sums() {
    do
    :: source < RANKS && SERVES(rank, source) -> post(source, COMBINE); source++
    :: source < RANKS && !SERVES(rank, source) -> source++
    :: source == RANKS -> source = 0; break
    od
}

inline combine() { /* moe/two_level_sums.py begin_combine, and moe/two_level_sums.py close_round */
#ifdef CLOSES
    if
    :: sums = 1
    :: sums = 0
    fi;
#if defined(GOAL_END)
    met_closed = met_closed || !sums;
    met_sums = met_sums || sums;
#endif
#endif
#ifdef PARTS
    read_slots(epoch);
    store_sums(1 - HOST(rank), 1 - HOST(rank)); /* triton_kernels/cpu/combine.py send_part */
    tell_word(rank, sums);
    publish(PART, rank);
#ifndef BROKEN_NO_PARTS_WAIT
    THERE(0) && THERE(1) && THERE(2) && THERE(3); /* triton_kernels/cpu/combine.py wait_for_parts */
#endif
    sum_home(1, 0);
    post_sums();
#endif
    read_slots(STALE); /* of the planes, for the places of sums; a round that is closed is not read any more either */
#ifdef BROKEN_EARLY_COMBINE
    tell_end(rank, sums);
    store_sums(0, 1);
#else
#ifdef PARTS
    store_sums(HOST(rank), HOST(rank));
#else
    store_sums(0, 1);
#endif
    tell_end(rank, sums);
#endif
    do /* moe/two_level_sums.py _send_home */
    :: source < RANKS && SERVES(rank, source) ->
#ifndef BROKEN_NO_SERVED_COMBINE
        tell_end(source, 1);
#endif
        source++
    :: source < RANKS && !SERVES(rank, source) -> source++
    :: source == RANKS -> source = 0; break
    od;
#ifndef BROKEN_NO_COMBINE_WAIT
    wait(COMBINE); /* moe/two_level_sums.py _sum_at_home */
#ifdef PARTS
    sum_home(0, 1);
#else
    sum_home(1, 1);
#endif
#endif
#ifndef PARTS
    post_sums();
#endif
#ifdef GOAL_AHEAD
    goal_reached = len(net[NET(AWAY(rank), rank)]) > 1;
    assert(!goal_reached); /* that a message of the next round waits behind the sums of this one */
#endif
#if defined(TWICE) && !defined(BROKEN_NO_SEQUENCE)
    if
    :: AWAY(rank) == 0 && rounds == 0 -> net[NET(0, rank)] ? DISPATCH, _ /* passed over, by its number */
    :: else
    fi;
#endif
    take(AWAY(rank), COMBINE)
}

active [RANKS] proctype thread() { /* the one thread of a rank */
    byte rank, source, peer, rounds, came, epoch;
    bit sums;
    d_step { rank = _pid; epoch = BEFORE_FIRST; sums = 1 }
    do
    :: rounds < EPOCHS ->
        dispatch();
        combine();
        rounds++
    :: rounds == EPOCHS -> ranks_done++; break
    od;
#ifdef GOAL_END
#ifdef CLOSES
    goal_reached = ranks_done == RANKS && met_closed && met_sums;
#else
    goal_reached = ranks_done == RANKS;
#endif
    assert(!goal_reached)
#endif
}
