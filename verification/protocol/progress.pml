/* Who stores straight into an output says after each piece that it is there: it is not named while it lives.
 *
 * One sender and one receiver, who has told its place and waits for the tail behind the last piece, with a clock as in
 * timing.pml: time stands still while anybody can do something. A live sender takes up to LAG to a piece. It dies at any
 * moment, or not; and at any moment, or never, some other rank reports that it gave up, upon which the receiver gives up,
 * too. It reports that, and a sender that sees this stores nothing more and reports itself. Claimed is that the receiver's
 * wait ends, is given up for a reason, and names nobody that lives, and that at most a piece is stored once it has given
 * up. That needs
 *
 *     LAG < TIMEOUT and LAG < GRACE
 *
 * however many pieces there are.
 *
 * Parameters: PIECES, LAG, TIMEOUT, GRACE. BROKEN_...: the protocol with one rule broken; the search must find an error.
 * GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifndef PIECES
#define PIECES 6
#endif
#ifndef LAG
#define LAG 1
#endif
#ifndef TIMEOUT
#define TIMEOUT 3
#endif
#ifndef GRACE
#define GRACE 2
#endif

byte stored; /* the number behind the tail's flag */
bool tail, dead, reported;
bool receiver_reported, sender_reported;
byte left[3]; /* time until the next event: of the sender, of the receiver, of those around */
#define TIME_IS_LEFT (left[0] + left[1] + left[2] > 0)

#if defined(GOAL_NAMED) || defined(GOAL_SPARED) || defined(GOAL_STOPPED)
bool goal_reached;
#endif

active proctype sender() {
    byte piece, lag, late_pieces;
    {
        do
#ifndef BROKEN_STORES_ON
        :: piece < PIECES && receiver_reported -> /* triton_kernels/cpu/straight.py place_is_gone */
#ifndef BROKEN_STOPS_SILENTLY
            sender_reported = true; /* triton_kernels/cpu/all_to_all_v.py end */
#endif
            goto stopped
        :: piece < PIECES && !receiver_reported ->
#else
        :: piece < PIECES ->
#endif
            atomic {
                select(lag : 0 .. LAG);
                left[0] = lag;
                lag = 0
            }
            left[0] == 0;
            late_pieces = late_pieces + (receiver_reported -> 1 : 0);
            assert(late_pieces <= 1);
            piece++;
#ifndef BROKEN_NO_PROGRESS
            stored = piece /* triton_kernels/cpu/straight.py store_straight */
#endif
        :: piece == PIECES -> break
        od;
        tail = true; /* triton_kernels/cpu/legs.py publish_tail */
stopped:
        skip
    } unless { dead }
}

active proctype receiver() {
    byte seen;
    left[1] = TIMEOUT;
    do
    :: tail -> goto finished /* triton_kernels/cpu/all_to_all_v.py recv_next */
    :: !tail && stored != seen -> /* triton_kernels/cpu/straight.py look_at_stores */
        atomic {
            seen = stored;
            left[1] = TIMEOUT
        }
    :: !tail && stored == seen && (reported || left[1] == 0) -> break /* triton_kernels/cpu/all_to_all_v.py late */
    od;
    assert(reported || dead); /* nobody gives up on who stores */
    atomic {
        receiver_reported = true; /* triton_kernels/cpu/all_to_all_v.py end */
        left[1] = GRACE
    }
    tail || stored != seen || sender_reported || left[1] == 0; /* triton_kernels/cpu/straight.py stores_meanwhile */
#ifdef GOAL_NAMED
    goal_reached = !tail && stored == seen && !sender_reported;
    assert(!goal_reached);
#endif
#ifdef GOAL_SPARED
    goal_reached = !tail && stored != seen;
    assert(!goal_reached);
#endif
#ifdef GOAL_STOPPED
    goal_reached = !tail && stored == seen && sender_reported;
    assert(!goal_reached);
#endif
    assert(tail || stored != seen || sender_reported || dead); /* whom it names is dead */
finished:
    left[1] = 0
}

active proctype others() {
    byte when;
    atomic {
        select(when : 0 .. PIECES * LAG + TIMEOUT);
        left[2] = when;
        when = 0
    }
    left[2] == 0;
    if
    :: dead = true
    :: reported = true
    :: true
    fi
}

active proctype clock() {
    do
    :: timeout && TIME_IS_LEFT ->
        d_step {
            left[0] = (left[0] > 0 -> left[0] - 1 : 0);
            left[1] = (left[1] > 0 -> left[1] - 1 : 0);
            left[2] = (left[2] > 0 -> left[2] - 1 : 0)
        }
    :: timeout && !TIME_IS_LEFT -> break
    od
}
