/* CPU ranks that pull: lines, rounds in which each rank stores into its own memory alone, legs in pieces, and sleep.
 *
 * Rounds: a memory cell holds the epoch in which it was last written, or BUSY while that lasts, so a read of what is
 * not there yet, or is not there any more, shows. Ranks close rounds or send sums as they like, and with MISMATCHES say
 * something else in a dispatch as they like. The ring here is of two lines a pair; that of the library is of four.
 *
 * LEG: one rank packs pieces into the first slot of its own memory that is free: once two readers have taken the lines
 * that named it.
 *
 * SLEEP: one rank waits for lines of two others, twice, and sleeps; nobody wakes it but they, and no sleep ends by
 * itself, as the library's do.
 *
 * Parameters: EPOCHS, MISMATCHES, LEG, PIECES, SLOTS, SLEEP. BROKEN_...: the protocol with one rule broken; the search
 * must find an error. GOAL_...: a state that the search must reach, written as an assertion that it does not.
 */

#ifdef GOAL_CLOSED_AND_SUMMED
#define GOAL
#endif
#ifdef GOAL_SLEPT
#define GOAL
#endif
#ifdef GOAL_SLOTS_WRITTEN_AGAIN
#define GOAL
#endif
#ifdef GOAL
bool goal_reached;
#endif

#if !defined(LEG) && !defined(SLEEP)

#ifndef EPOCHS
#define EPOCHS 3
#endif
#define RANKS 3
#ifdef BROKEN_RING_OF_ONE
#define RING 1
#else
#define RING 2
#endif
#define BUSY 255
#define CLOSED 0
#define WITH_SUMS 1
#define RIGHT ((rank + 1) % RANKS)
#define LEFT ((rank + 2) % RANKS)
#define PAIR(reader, writer) ((reader) * RANKS + (writer))
#define LINE(reader, writer, number) (PAIR(reader, writer) * RING + (number) % RING)

byte tokens[RANKS]; /* in each rank's own memory */
byte sums[RANKS];
byte flag[RANKS * RANKS * RING]; /* at the reader */
byte word[RANKS * RANKS * RING];
byte taken_there[RANKS * RANKS]; /* at the writer: lines that the reader has taken */
bit differs[EPOCHS + 1]; /* what ranks have said */

inline put_at(peer, said) { /* triton_kernels/cpu/lines.py put_line */
    assert(taken_there[PAIR(peer, rank)] + RING >= number);
    word[LINE(peer, rank, number)] = said;
    flag[LINE(peer, rank, number)] = number
}

inline put(said) { /* triton_kernels/cpu/rounds.py tell_all */
    number++;
    put_at(RIGHT, said);
    put_at(LEFT, said)
}

inline take(peer, said) { /* triton_kernels/cpu/lines.py take_line, in triton_kernels/cpu/rounds.py take_lines */
    said = word[LINE(rank, peer, number)];
    taken_there[PAIR(rank, peer)] = number
}

inline wait() { /* fused/pulled.py wait, in fused/pulled.py await_peers */
    (flag[LINE(rank, RIGHT, number)] == number && flag[LINE(rank, LEFT, number)] == number)
}

inline dispatch() { /* moe/pulled.py begin; triton_kernels/cpu/rounds.py send_tokens */
    own = 0;
#ifdef MISMATCHES
    if
    :: own = 1; differs[epoch] = 1
    :: skip
    fi;
#endif
#ifdef BROKEN_EARLY_LINE
    put(own);
    tokens[rank] = BUSY;
    tokens[rank] = epoch;
#else
    tokens[rank] = BUSY;
    tokens[rank] = epoch;
    put(own);
#endif
#ifndef BROKEN_NO_DISPATCH_WAIT
    wait();
#endif
    take(RIGHT, of_right);
    take(LEFT, of_left);
    same = !(own || of_right || of_left);
    assert(same == !differs[epoch]); /* moe/pulled.py _arrive: all ranks find the same */
    if
    :: same -> /* triton_kernels/cpu/rounds.py route; triton_kernels/cpu/rounds.py gather */
        assert(tokens[RIGHT] == epoch);
        assert(tokens[LEFT] == epoch)
    :: else
    fi
}

inline combine() { /* moe/pulled.py begin_combine, and moe/pulled.py close_round */
    own = CLOSED;
    if
    :: same -> own = WITH_SUMS
    :: true
    fi;
#ifdef BROKEN_EARLY_SUMS_LINE
    put(own);
#endif
    if
    :: own == WITH_SUMS -> /* triton_kernels/cpu/rounds.py send_sums */
        sums[rank] = BUSY;
        sums[rank] = epoch
    :: else
    fi;
#ifndef BROKEN_EARLY_SUMS_LINE
    put(own);
#endif
#ifndef BROKEN_NO_COMBINE_WAIT
    wait();
#endif
    take(RIGHT, of_right);
    take(LEFT, of_left);
    if
    :: own == WITH_SUMS -> /* triton_kernels/cpu/rounds.py sum_home */
        assert(of_right != WITH_SUMS || sums[RIGHT] == epoch);
        assert(of_left != WITH_SUMS || sums[LEFT] == epoch)
    :: else
    fi
#ifdef GOAL_CLOSED_AND_SUMMED
    if
    :: epoch == EPOCHS && own == WITH_SUMS && of_right == CLOSED && of_left == WITH_SUMS -> goal_reached = true
    :: else
    fi;
    assert(!goal_reached)
#endif
}

active [RANKS] proctype thread() {
    byte rank, epoch, number, own, of_right, of_left;
    bit same;
    rank = _pid;
    do
    :: epoch < EPOCHS ->
        epoch++;
        dispatch();
        combine()
    :: else -> break
    od
}

#endif
#ifdef LEG

#define READERS 2
#ifndef PIECES
#define PIECES 6
#endif
#ifndef SLOTS
#define SLOTS 4
#endif

byte slot[SLOTS]; /* which piece it holds, from 1 on; 0 while it is written */
byte mark[SLOTS]; /* how many lines were put when it was last written */
byte put_lines[READERS]; /* how many lines are put at a reader: the flag of its last one */
byte place[READERS * SLOTS]; /* the slot that a reader's line names, in a ring of as many lines as there are slots */
byte taken_there[READERS]; /* at the writer: lines that the reader has taken */

#ifdef BROKEN_ONE_READER
#define IS_BUSY(number) (mark[number] > taken_there[0])
#else
#define IS_BUSY(number) (mark[number] > taken_there[0] || mark[number] > taken_there[1])
#endif

active proctype packer() { /* triton_kernels/cpu/pull.py send_kernel */
    byte piece, reader, chosen, number;
    do
    :: piece == PIECES -> break
    :: else ->
        piece++;
#ifdef BROKEN_NO_ACKNOWLEDGEMENT
        chosen = piece % SLOTS;
#else
        do
        :: true ->
            chosen = 0; /* triton_kernels/cpu/pull.py find_slot */
            do
            :: chosen < SLOTS && IS_BUSY(chosen) -> chosen++
            :: else -> break
            od;
            if
            :: chosen < SLOTS -> break
            :: else
            fi;
            chosen = 0; /* the one that was written first */
            for (number : 1 .. SLOTS - 1) {
                if
                :: mark[number] < mark[chosen] -> chosen = number
                :: else
                fi
            }
            (!IS_BUSY(chosen))
        od;
#endif
#ifdef BROKEN_EARLY_PIECE_LINE
        place[piece % SLOTS] = chosen;
        put_lines[0] = piece;
#endif
        slot[chosen] = 0;
        slot[chosen] = piece;
        for (reader : 0 .. READERS - 1) { /* triton_kernels/cpu/pull.py publish */
            assert(taken_there[reader] + SLOTS >= piece);
            place[reader * SLOTS + piece % SLOTS] = chosen;
            put_lines[reader] = piece
        }
        mark[chosen] = piece;
#ifdef GOAL_SLOTS_WRITTEN_AGAIN
        goal_reached = piece == PIECES;
        assert(!goal_reached)
#endif
    od
}

active [READERS] proctype unpacker() { /* triton_kernels/cpu/pull.py take_kernel */
    byte rank, piece;
    rank = _pid - 1;
    do
    :: piece == PIECES -> break
    :: else ->
        piece++;
        (put_lines[rank] >= piece);
#ifdef BROKEN_EARLY_TAKE
        taken_there[rank] = piece;
#endif
        assert(slot[place[rank * SLOTS + piece % SLOTS]] == piece);
        taken_there[rank] = piece
    od
}

#endif
#ifdef SLEEP

#define WRITERS 2
#define LINES 2

byte put_lines[WRITERS]; /* how many lines each has put: the flag of its last one */
bit awaited[WRITERS];
short asleep;
bit sleeping;

inline exchange(writer, found) {
    atomic { found = awaited[writer]; awaited[writer] = 0 }
}

active proctype waiter() { /* triton_kernels/cpu/lines.py wait_kernel */
    byte number, writer, count;
    bit was, late[WRITERS];
    short sleepers;
    number = 1;
    do
    :: number > LINES -> break
    :: else ->
        count = 0; /* triton_kernels/cpu/lines.py count_late */
        for (writer : 0 .. WRITERS - 1) {
            late[writer] = put_lines[writer] < number;
            count = count + late[writer]
        }
        if
        :: count == 0 -> number++
        :: else ->
            asleep = count;
            for (writer : 0 .. WRITERS - 1) {
                awaited[writer] = late[writer]
            }
#ifndef BROKEN_NO_SECOND_LOOK
            for (writer : 0 .. WRITERS - 1) {
                if
                :: late[writer] && put_lines[writer] >= number ->
                    exchange(writer, was);
                    asleep = asleep - was
                :: else
                fi
            }
#endif
            sleepers = asleep;
            if
            :: sleepers > 0 ->
                atomic { /* the kernel compares, and puts to sleep */
#ifdef BROKEN_NO_COMPARE
                    sleeping = 1
#else
                    sleeping = (asleep == sleepers)
#endif
                };
#ifdef GOAL_SLEPT
                goal_reached = goal_reached || (sleeping && number == LINES);
                assert(!goal_reached);
#endif
                (!sleeping)
            :: else
            fi;
            for (writer : 0 .. WRITERS - 1) {
                exchange(writer, was)
            }
        fi
    od
}

active [WRITERS] proctype writer() { /* triton_kernels/cpu/lines.py put_line; triton_kernels/cpu/lines.py wake */
    byte rank, line;
    bit was;
    rank = _pid - 1;
    do
    :: line == LINES -> break
    :: else ->
        line++;
#ifdef BROKEN_NO_FENCE
        was = awaited[rank]; /* before the line is seen */
        put_lines[rank] = line;
#else
        put_lines[rank] = line;
        was = awaited[rank];
#endif
#ifdef BROKEN_NO_WAKE
        was = 0;
#endif
        if
        :: was ->
            exchange(rank, was);
            if
            :: was ->
                atomic { asleep--; was = (asleep == 0) };
                if
                :: was -> sleeping = 0
                :: else
                fi
            :: else
            fi
        :: else
        fi
    od
}

#endif
