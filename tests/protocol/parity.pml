/* One-way collectives whose messages fit into one half of the buffer: the halves alternate with the epoch.
 *
 * In every epoch a rank sends one row or none to each peer and then signals everyone, whether it sent rows or not. It
 * begins the next epoch when everyone has signalled this one and it has read what came. A memory cell holds the epoch
 * in which it was last written, so a read that comes too early or too late shows. The stores of a message come in
 * every order, a header, and a row in two halves; the flags come after them.
 *
 * Accesses of one kernel to several ranks that lie between the same two synchronisations are one step: an access of
 * another rank that is not ordered against one of them may come before all of them or after all. Cells that were read
 * for the last time are marked STALE, which the real memory does not do.
 *
 * Epochs have three bits and begin at 6, so they wrap.
 *
 * Parameters: RANKS (2 or 3), EPOCHS. BROKEN_...: the protocol with one rule broken; the search must find an error.
 * GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif

#define BEFORE_FIRST 5
#define NEXT(epoch) (((epoch) + 1) & 7)
#define PREVIOUS(epoch) (((epoch) + 7) & 7)
#ifdef BROKEN_EQUALITY
#define REACHED(flag, epoch) ((flag) == (epoch))
#else
#define REACHED(flag, epoch) ((((flag) - (epoch)) & 7) < 4) /* triton_kernels/cpu/signal.py signalled, with three bits */
#endif

#define NEVER 15 /* written in no epoch */
#define STALE 14 /* read for the last time */

#ifdef BROKEN_ONE_BUFFER
#define HALF(epoch) 0
#else
#define HALF(epoch) ((epoch) & 1)
#endif
#ifdef BROKEN_ONE_HEADER
#define HEADER_HALF(epoch) 0
#else
#define HEADER_HALF(epoch) ((epoch) & 1)
#endif

#define AT(rank, source) ((rank) * RANKS + (source)) /* lies at `rank`, written by `source` */
#define IN(half, rank, source) ((half) * RANKS * RANKS + AT(rank, source))

#ifdef BROKEN_CLEARED_FLAG
bit flag[RANKS * RANKS]; /* set by its writer, cleared by its reader */
#else
byte flag[RANKS * RANKS] = BEFORE_FIRST;
#endif
byte header[2 * RANKS * RANKS] = NEVER;
bit num_rows[2 * RANKS * RANKS];
byte row_first[2 * RANKS * RANKS] = NEVER;
byte row_second[2 * RANKS * RANKS] = NEVER;

#define HAS(ranks, rank) (((ranks) >> (rank)) & 1)
#define EVERYONE ((1 << RANKS) - 1)

#define HEADER 1
#define ROW_FIRST 2
#define ROW_SECOND 4

byte ranks_done;
#if defined(GOAL_END) || defined(GOAL_AHEAD)
bool goal_reached;
bool met_no_peers, met_all_peers;
byte epochs_read[RANKS];
#endif

/* Without zero-row signals only those are signalled who get rows, and only those are awaited who send some. Here rank 0
 * never has rows for rank 1, and both know it. */
#ifdef BROKEN_ONLY_ROWS_SIGNAL
#define CONNECTED(source, target) ((source) != 0 || (target) != 1)
#else
#define CONNECTED(source, target) true
#endif

inline signal_peer(peer) { /* triton_kernels/cpu/channel.py send_next; triton_kernels/channel.py publish_header */
    if
#ifdef BROKEN_CLEARED_FLAG
    :: true -> flag[AT(peer, rank)] = 1
#else
    :: CONNECTED(rank, peer) -> flag[AT(peer, rank)] = epoch
    :: !CONNECTED(rank, peer)
#endif
    fi
}

inline await_peer(peer) { /* triton_kernels/cpu/channel.py read_header; triton_kernels/channel.py wait_kernel */
#ifdef BROKEN_CLEARED_FLAG
    d_step { flag[AT(rank, peer)] -> flag[AT(rank, peer)] = 0 }
#else
    !CONNECTED(peer, rank) || REACHED(flag[AT(rank, peer)], epoch)
#endif
}

inline send_whole_messages() {
    atomic { /* triton_kernels/cpu/channel.py begin: the next epoch; any set of peers gets rows */
        epoch = NEXT(epoch);
        peer = 0;
        do
        :: peer < RANKS && peer != rank && CONNECTED(rank, peer) -> receivers = receivers | (1 << peer); peer++
        :: peer < RANKS -> peer++
        :: peer == RANKS -> break
        od;
#ifdef GOAL_END
        met_no_peers = met_no_peers || receivers == 0;
        met_all_peers = met_all_peers || receivers == EVERYONE - (1 << rank);
#endif
        peer = 0;
        todo = HEADER | ROW_FIRST | ROW_SECOND
    }
    do /* triton_kernels/cpu/channel.py send_next; triton_kernels/channel.py send_rows_kernel: into this epoch's half */
    :: d_step {
        (todo & HEADER) -> todo = todo & ~HEADER;
        for (peer : 0 .. RANKS - 1) {
            num_rows[IN(HEADER_HALF(epoch), peer, rank)] = HAS(receivers, peer);
            header[IN(HEADER_HALF(epoch), peer, rank)] = epoch
        };
        peer = 0 }
    :: d_step {
        (todo & ROW_FIRST) -> todo = todo & ~ROW_FIRST;
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(receivers, peer) -> row_first[IN(HALF(epoch), peer, rank)] = epoch
            :: else
            fi
        };
        peer = 0 }
    :: d_step {
        (todo & ROW_SECOND) -> todo = todo & ~ROW_SECOND;
        for (peer : 0 .. RANKS - 1) {
            if
            :: HAS(receivers, peer) -> row_second[IN(HALF(epoch), peer, rank)] = epoch
            :: else
            fi
        };
        peer = 0 }
    :: todo == 0 -> break
    od;
    signal_peer((rank + 1) % RANKS);
#if RANKS > 2
    signal_peer((rank + 2) % RANKS);
#endif
    receivers = 0
}

inline wait_for_messages() {
    await_peer((rank + 1) % RANKS);
#if RANKS > 2
    await_peer((rank + 2) % RANKS)
#endif
}

inline read_message(source, reading) {
    if
    :: source == rank || !CONNECTED(source, rank)
    :: else ->
        assert(header[IN(HEADER_HALF(reading), rank, source)] == reading);
        if
        :: num_rows[IN(HEADER_HALF(reading), rank, source)] ->
            assert(row_first[IN(HALF(reading), rank, source)] == reading);
            assert(row_second[IN(HALF(reading), rank, source)] == reading)
        :: else
        fi;
        header[IN(HEADER_HALF(reading), rank, source)] = STALE;
        num_rows[IN(HEADER_HALF(reading), rank, source)] = 0;
        row_first[IN(HALF(reading), rank, source)] = STALE;
        row_second[IN(HALF(reading), rank, source)] = STALE
    fi
}

inline drain(reading) { /* triton_kernels/cpu/channel.py recv_next; triton_kernels/channel.py recv_rows_kernel */
    d_step {
        for (peer : 0 .. RANKS - 1) {
            read_message(peer, reading)
        };
#ifdef GOAL_AHEAD
        epochs_read[rank]++;
#endif
        peer = 0
    }
}

active [RANKS] proctype stream() {
    byte rank, peer, todo, epoch, receivers, rounds;
    d_step { rank = _pid; epoch = BEFORE_FIRST }
    do
    :: rounds < EPOCHS ->
        send_whole_messages();
#ifdef GOAL_AHEAD
        atomic {
            for (peer : 0 .. RANKS - 1) {
                goal_reached = goal_reached || epochs_read[peer] < rounds
            };
            assert(!goal_reached); /* that a rank signals an epoch before a peer has read the last one */
            peer = 0
        }
#endif
#ifdef BROKEN_LATE_DRAIN /* what came is read only when the next epoch has begun */
        if
        :: rounds == 0
        :: rounds > 0 -> drain(PREVIOUS(epoch))
        fi;
#endif
        wait_for_messages();
#ifndef BROKEN_LATE_DRAIN
        drain(epoch);
#endif
        rounds++
    :: rounds == EPOCHS -> break
    od;
    atomic {
        ranks_done++;
#ifdef GOAL_END
        goal_reached = ranks_done == RANKS && met_no_peers && met_all_peers;
        assert(!goal_reached)
#endif
    }
}
