/* Rows straight into the output: what a sender stores into memory whose user is somebody else's business.
 *
 * One receiver and one sender, as what is new concerns each ordered pair by itself. In every epoch the receiver's user
 * first has the region for itself; then the receiver tells a place in it or none, publishes its header, waits for the
 * sender's, and takes the piece of the ring that follows, if one does. Where it expected something else than what comes,
 * it takes that piece and drops it. The sender publishes its header, waits for the receiver's, reads the place, and puts
 * what follows there or into the ring: it may do without the place, as it may not know the region. Headers and their
 * halves are those of legs.pml; here the receiver's has only the flag, and the sender's says whether a piece follows.
 *
 * A memory cell holds the epoch in which it was last written, the region that of the last store by the sender, or USER.
 * The region has two parts, and the place two words. Flags, numbers of pieces and marks do not wrap here.
 *
 * Parameters: EPOCHS. BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state
 * that the search must reach, written as an assertion that it does not.
 */

#ifndef EPOCHS
#define EPOCHS 5
#endif
#define USER 100

byte header_of_receiver, header_of_sender; /* flags */
bool follows[2]; /* what the sender's header says, by parity */
byte word_first, word_second; /* the place: in which epoch each word was written, */
bool told_first, told_second; /* and what it says: a place, or none */
byte out_first = USER, out_second = USER; /* the region */
byte slot; /* the ring's only one */
byte tail, head, mark;

#if defined(GOAL_END) || defined(GOAL_AHEAD)
bool goal_reached;
bool met_straight, met_ring, met_refused, met_dropped;
#endif
byte epochs_read;

active proctype receiver() {
    byte epoch, received;
    bool told, differs, straight;
    do
    :: epoch < EPOCHS ->
        out_first = USER; /* the user has it, and whatever it reads must be its own */
        out_second = USER;
        assert(out_first == USER && out_second == USER);
        atomic {
            epoch++;
            if
            :: told = true
            :: told = false
            fi;
            if
            :: differs = false
            :: differs = true
            fi
        }
#ifdef BROKEN_STALE_PLACE
        if
        :: !told
        :: told ->
#endif
            word_first = epoch; told_first = told; /* triton_kernels/cpu/straight.py tell_places */
            word_second = epoch; told_second = told;
#ifdef BROKEN_STALE_PLACE
        fi;
#endif
        assert(out_first == USER && out_second == USER);
        header_of_receiver = epoch; /* triton_kernels/cpu/all_to_all_v.py send_next */
        header_of_sender >= epoch; /* triton_kernels/cpu/all_to_all_v.py read_header */
        if
        :: !follows[epoch & 1]
#ifdef BROKEN_LEAVES_PIECES
        :: follows[epoch & 1] && differs
        :: follows[epoch & 1] && !differs ->
#else
        :: follows[epoch & 1] ->
#endif
            tail > received; /* triton_kernels/cpu/all_to_all_v.py ring_has_piece */
#ifdef BROKEN_NO_MARK
            straight = told;
#else
#ifdef BROKEN_MARK_WITHOUT_NUMBER
            straight = told && mark > 0;
#else
            straight = told && mark == received + 1; /* triton_kernels/cpu/straight.py came_straight */
#endif
#endif
            if
            :: straight -> assert(out_first == epoch && out_second == epoch)
            :: !straight && !differs -> /* triton_kernels/cpu/all_to_all_v.py recv_next */
                assert(slot == epoch);
                assert(out_first == USER && out_second == USER)
            :: !straight && differs
            fi;
#ifdef GOAL_END
            met_straight = met_straight || straight;
            met_ring = met_ring || !told;
            met_refused = met_refused || (told && !straight);
            met_dropped = met_dropped || differs;
#endif
            atomic {
                received++;
                head = received
            }
        fi;
        if
        :: straight -> assert(out_first == epoch && out_second == epoch) /* the user reads what came */
        :: else -> assert(out_first == USER && out_second == USER)
        fi;
        straight = false;
        epochs_read++
    :: epoch == EPOCHS -> break
    od;
#ifdef GOAL_END
    goal_reached = met_straight && met_ring && met_refused && met_dropped;
    assert(!goal_reached)
#endif
}

active proctype sender() {
    byte epoch, sent;
    bool more, takes;
    do
    :: epoch < EPOCHS ->
        atomic {
            epoch++;
            if
            :: more = true
            :: more = false
            fi
        }
        follows[epoch & 1] = more;
        header_of_sender = epoch; /* triton_kernels/cpu/all_to_all_v.py send_next */
#ifdef GOAL_AHEAD
        goal_reached = epochs_read + 1 < epoch;
        assert(!goal_reached);
#endif
#ifdef BROKEN_NO_READINESS
        header_of_receiver >= epoch - 1;
#else
        header_of_receiver >= epoch; /* triton_kernels/cpu/all_to_all_v.py read_header */
#endif
        if
        :: !more
        :: more ->
            takes = told_first; /* triton_kernels/cpu/straight.py read_place */
#ifndef BROKEN_NO_READINESS
            assert(word_first == epoch || !takes);
            takes = takes && told_second;
            assert(word_second == epoch || !takes);
#endif
            if
            :: takes -> takes = false /* a region that this rank does not know */
            :: true
            fi;
            if
            :: takes ->
#ifdef BROKEN_EARLY_TAIL
                mark = sent + 1;
                tail = sent + 1;
#endif
                out_first = epoch; /* triton_kernels/cpu/straight.py store_straight */
                out_second = epoch;
#ifndef BROKEN_EARLY_TAIL
                mark = sent + 1; /* triton_kernels/cpu/straight.py mark_straight */
                tail = sent + 1; /* triton_kernels/cpu/legs.py publish_tail */
#endif
                sent++
            :: !takes ->
                sent == head; /* triton_kernels/cpu/all_to_all_v.py ring_has_room */
                slot = epoch;
                sent++;
                tail = sent
            fi
        fi;
        header_of_receiver >= epoch
    :: epoch == EPOCHS -> break
    od
}
