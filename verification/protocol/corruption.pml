/* How the programs of one launch tell what does not fit its checksums, when several of them may find something at once.
 *
 * A kernel of one program waits for a leg and looks at headers. Then two programs of two threads each read rows, and
 * arrive; the last one publishes what was made of them. A header, or a row that a program has read, may not fit. Then
 * one program's words are reported to the host, the peer is told that this rank is stuck instead of being sent anything,
 * and the status keeps the next launch from running. Threads of a program read the status one after the other, and must
 * read the same: they would wait for each other at different barriers. A word of the report is at first only on its way,
 * as in publish.pml.
 *
 * BROKEN_...: the protocol with one rule broken; the search must find an error. GOAL_...: a state that the search must
 * reach, written as an assertion that it does not.
 */

#define PROGRAMS 2
#define THREADS 2
#define LAUNCHES 2
#define ALL (PROGRAMS * THREADS)
#define HEADER 3 /* in the place of the number of the program that found a row */

byte on_its_way[2 * PROGRAMS]; /* a word of the report that a program stored, while it has not landed; else 0 */
byte word[2]; /* of the report, in the host's memory */
bool told; /* report[REPORT_STATUS], which the host looks at */
bool running = true, found; /* control[CONTROL_STATUS], control[CONTROL_FOUND] */
byte arrivals; /* control[CONTROL_ARRIVALS] */
byte at_barrier[PROGRAMS]; /* threads that have come to the program's barrier, in all launches */
bool runs[ALL]; /* what each thread has read of the status */
byte launched, ended; /* launches begun by the stream; threads that have ended, in all launches */
byte tail; /* at the peer */
bool stuck; /* at the peer */
bool unfit[LAUNCHES + 1]; /* whether something that a launch has read does not fit */

#ifdef GOAL_END
bool goal_reached;
#endif
#ifdef GOAL_BOTH
bool goal_reached, finds[PROGRAMS];
#endif

#define LANDED(program) (on_its_way[2 * (program)] == 0 && on_its_way[2 * (program) + 1] == 0)
#define OVER (ended == ALL * LAUNCHES)

active proctype memory() {
    do
    :: d_step { on_its_way[0] -> word[0] = on_its_way[0]; on_its_way[0] = 0 }
    :: d_step { on_its_way[1] -> word[1] = on_its_way[1]; on_its_way[1] = 0 }
    :: d_step { on_its_way[2] -> word[0] = on_its_way[2]; on_its_way[2] = 0 }
    :: d_step { on_its_way[3] -> word[1] = on_its_way[3]; on_its_way[3] = 0 }
    :: atomic { OVER && LANDED(0) && LANDED(1) -> break }
    od
}

inline end_exchange(program) {
    LANDED(program); /* triton_kernels/signal.py publish: barrier and release */
    stuck = true; /* triton_kernels/exchange_checksum.py end_exchange */
    running = false; /* triton_kernels/signal.py poison */
    LANDED(program);
    told = true /* triton_kernels/signal.py poison: the host's word goes last */
}

inline note(program, what) { /* triton_kernels/exchange_checksum.py note_corruption */
    unfit[launch] = true;
    atomic { first = !found; found = true };
    if
#ifdef BROKEN_NO_EXCHANGE
    :: true -> /* every program writes what it has found */
#else
    :: first ->
#endif
        on_its_way[2 * program] = what;
        on_its_way[2 * program + 1] = what
#ifndef BROKEN_NO_EXCHANGE
    :: else
#endif
    fi
}

active proctype stream() { /* a kernel begins when the one before it has ended */
    byte launch;
    bool first;
    do
    :: launched < LAUNCHES && ended == launched * ALL ->
        launch = launched + 1;
        if
        :: running -> note(0, HEADER); end_exchange(0) /* triton_kernels/exchange.py wait_leg: a header does not fit */
        :: true
        fi;
        launched++
    :: launched == LAUNCHES -> break
    od
}

inline run_thread(program, thread) {
    do
    :: launch < LAUNCHES ->
        launched > launch;
        launch++;
        runs[program * THREADS + thread] = running;
        if
        :: thread == 0 && runs[program * THREADS] ->
            if
            :: note(program, program + 1); /* triton_kernels/collective_rows.py recv_row: a row does not fit */
#ifdef GOAL_BOTH
                finds[program] = true;
#endif
#ifdef BROKEN_EARLY_STATUS
                if
                :: first -> end_exchange(program)
                :: else
                fi
#endif
            :: true
            fi
        :: else
        fi;
        at_barrier[program]++; /* triton_kernels/signal.py arrive: a barrier */
        at_barrier[program] >= THREADS * launch;
        assert(runs[program * THREADS] == runs[program * THREADS + 1]);
        if
        :: thread == 0 && runs[program * THREADS] ->
#ifndef BROKEN_RELAXED_ARRIVAL
            LANDED(program);
#endif
            atomic { /* triton_kernels/signal.py arrive */
                last = (arrivals == PROGRAMS - 1);
                arrivals++;
                if
                :: last -> arrivals = 0
                :: else
                fi
            };
            if
            :: last -> /* triton_kernels/exchange_checksum.py arrive_whole */
                if
#ifdef BROKEN_PUBLISHES
                :: found -> tail = launch; end_exchange(program)
#else
                :: found ->
#ifdef GOAL_BOTH
                    goal_reached = finds[0] && finds[1];
                    assert(!goal_reached);
#endif
                    end_exchange(program)
#endif
                :: else -> tail = launch
                fi
            :: else
            fi
        :: else
        fi;
        first = false;
        last = false;
        ended++
    :: launch == LAUNCHES -> break
    od
}

active [ALL] proctype thread_of_program() {
    byte launch;
    bool first, last;
    run_thread((_pid - 2) / THREADS, (_pid - 2) % THREADS)
}

active proctype peer() {
    byte taken_in;
    do
    :: tail > taken_in ->
        taken_in++;
        assert(!unfit[taken_in])
    :: stuck && tail == taken_in -> break
    :: OVER && !stuck && tail == taken_in ->
        assert(tail == LAUNCHES); /* nobody is left waiting */
#ifdef GOAL_END
        goal_reached = true;
        assert(!goal_reached);
#endif
        break
    od
}

active proctype host() { /* fused/direct_transport.py raise_findings */
    byte source, row;
    if
    :: told ->
        source = word[0];
        row = word[1];
        assert(source == row);
        assert(source > 0)
    :: OVER && !told -> assert(!unfit[1] && !unfit[2])
    fi
}
