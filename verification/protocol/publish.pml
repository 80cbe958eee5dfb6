/* How the programs of one kernel publish_header what all their threads stored, on memory that does not keep order.
 *
 * Two programs of two threads each store a part of a message into a peer's memory. A store is at first only on its way;
 * it lands at some later time, in any order with others. What orders it is what the kernels order it by:
 *   - a barrier: what the program's threads stored before it comes before what its first thread does after it;
 *   - an add with release order waits until all that comes before it has landed;
 *   - acquire order keeps later loads from being done early.
 * The last program to arrive publishes: each of its threads has a flag of its own, of the epoch that it has loaded. The
 * peer reads the message once it sees the flags. There are two launches.
 *
 * BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state that the search must
 * reach, written as an assertion that it does not.
 */

#define PROGRAMS 2
#define THREADS 2
#define PARTS (PROGRAMS * THREADS)
#define PART(program, thread) ((program) * THREADS + (thread))
#define ROUNDS 2

byte on_its_way[PARTS]; /* the round's number, while a store has not landed; else 0 */
byte part[PARTS]; /* the peer's memory */
byte flag[THREADS]; /* at the peer */

byte epoch, arrivals; /* control[CONTROL_EPOCH], control[CONTROL_ARRIVALS] */
byte at_barrier[PROGRAMS]; /* threads that have come to the program's barrier, in all launches */
byte told[PROGRAMS]; /* the last launch in which a program's first thread has told the others what the add found */
bool is_last[PROGRAMS]; /* what it found */
byte loaded[PROGRAMS]; /* threads of last programs that have loaded the epoch, in all launches */
byte launched, ended; /* launches begun by the stream; threads that have ended, in all launches */
byte answered; /* rounds that the peer has read and answered */

#ifdef GOAL_END
bool goal_reached;
#endif
#ifdef GOAL_SECOND_LAST
bool goal_reached;
#endif

#define LANDED(program, thread) (on_its_way[PART(program, thread)] == 0)

active proctype memory() {
    do
    :: d_step { on_its_way[0] -> part[0] = on_its_way[0]; on_its_way[0] = 0 }
    :: d_step { on_its_way[1] -> part[1] = on_its_way[1]; on_its_way[1] = 0 }
    :: d_step { on_its_way[2] -> part[2] = on_its_way[2]; on_its_way[2] = 0 }
    :: d_step { on_its_way[3] -> part[3] = on_its_way[3]; on_its_way[3] = 0 }
    :: atomic { answered == ROUNDS -> break }
    od
}

active proctype stream() { /* a kernel begins when the one before it has ended, and when the peer has answered */
    do
    :: launched < ROUNDS && ended == launched * PARTS && answered == launched -> launched++
    :: launched == ROUNDS -> break
    od
}

inline run_thread(program, thread) {
    do
    :: round < ROUNDS ->
        launched > round;
        round++;
        mine = epoch + 1; /* triton_kernels/dispatch.py send_tokens_kernel: this round's epoch */
#ifdef BROKEN_EARLY_EPOCH
        if /* the first program sets the epoch at once, and the second may come later */
        :: thread == 0 && program == 0 -> epoch = mine
        :: else
        fi;
#endif
        on_its_way[PART(program, thread)] = round; /* triton_kernels/dispatch.py send_tokens_kernel: a part of a row */
        at_barrier[program]++; /* triton_kernels/signal.py arrive: the barrier */
        if
        :: thread == 0 ->
#ifndef BROKEN_NO_BARRIER
            at_barrier[program] >= THREADS * round; /* triton_kernels/signal.py arrive */
#endif
#ifndef BROKEN_RELAXED_ARRIVAL
#ifdef BROKEN_NO_BARRIER
            LANDED(program, 0); /* the release knows of its own thread's store only */
#else
            LANDED(program, 0) && LANDED(program, 1);
#endif
#endif
            atomic { /* triton_kernels/signal.py arrive: the add, and the counter's reset by the last */
                last = (arrivals == PROGRAMS - 1);
                is_last[program] = last;
                told[program] = round;
                arrivals++;
                if
#ifndef BROKEN_NO_RESET
                :: last -> arrivals = 0
#endif
                :: else
                fi
            };
        :: else ->
            told[program] == round;
            last = is_last[program]
        fi;
        if
        :: last ->
#ifdef GOAL_SECOND_LAST
            goal_reached = program == 1 && round == ROUNDS;
            assert(!goal_reached);
#endif
#ifndef BROKEN_EARLY_EPOCH
            mine = epoch + 1; /* triton_kernels/signal.py advance: every thread loads the epoch */
            lasts++;
            loaded[program]++;
#ifndef BROKEN_LATE_EPOCH
            loaded[program] >= THREADS * lasts; /* triton_kernels/signal.py advance: the barrier */
#endif
            if
            :: thread == 0 -> epoch = mine /* triton_kernels/signal.py advance: one stores it */
            :: else
            fi;
#endif
#ifndef BROKEN_NO_BARRIER
            LANDED(program, 0) && LANDED(program, 1); /* triton_kernels/signal.py publish: barrier and release */
#endif
            flag[thread] = mine /* triton_kernels/signal.py publish */
        :: else
        fi;
        last = false;
        ended++
    :: round == ROUNDS -> break
    od
}

active [PARTS] proctype thread_of_program() {
    byte round, mine, lasts;
    bool last;
    run_thread((_pid - 2) / THREADS, (_pid - 2) % THREADS)
}

active proctype peer() {
    byte round, seen[PARTS];
    do
    :: round < ROUNDS ->
        round++;
#ifdef BROKEN_RELAXED_LOOK /* a load may be done before the flag's is */
        if
        :: seen[3] = part[3]; flag[0] >= round && flag[1] >= round
        :: flag[0] >= round && flag[1] >= round; seen[3] = part[3]
        fi;
#else
        flag[0] >= round && flag[1] >= round; /* triton_kernels/signal.py wait_for_all: acquire, then a barrier */
        seen[3] = part[3];
#endif
        assert(flag[0] == round);
        assert(flag[1] == round);
        assert(part[0] == round);
        assert(part[1] == round);
        assert(part[2] == round);
        assert(seen[3] == round);
        answered++
    :: round == ROUNDS -> break
    od;
#ifdef GOAL_END
    goal_reached = true;
    assert(!goal_reached)
#endif
}
