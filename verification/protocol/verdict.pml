/* Who is lost, as ranks agree at their boards, while links are cut and come back. The steps are those of
comm/agreement/standby.py _vote, comm/agreement/standby.py _settle, comm/agreement/standby.py _meet and comm/agreement/standby.py confirm; a board keeps what
comm/agreement/boards.py _pin says.

A rank reports whom it misses on the board of the lowest rank that it reaches, and may make a verdict there once enough
have reported: time may be up at any moment, so a rank that sleeps and wakes late is one that takes its steps late. It
pins the verdict on its own board and leaves it in letters, which arrive at any time, or never. Then it looks at all
boards that it reaches, and meets the others at the board of the lowest rank that is not lost.

Always: no world of one, and no rank is in two worlds, or counted to one while it is in another. With a majority as the
quorum there is one world at most. A link that is cut as a world is confirmed leaves a rank out, which others count on.

RANKS       3
NO_CHANGES  links stay as they are at first, any of them cut; else one is cut, or comes back, at any time
UP          at first no link is cut
MAJORITY    as the quorum, else any two
HEALS       ranks that have voted wait until all have, and all links are back; then all hold one verdict. There are
            letters then, and ranks may miss one rank alone; else they would make the search of meetings too long
BROKEN_ALONE        a rank makes a verdict, and goes on, by itself
BROKEN_FIRST        the first verdict that a rank learns of holds, not the stronger
BROKEN_ONLY_LOST    a rank looks only at boards of those who are lost by its own verdict
BROKEN_UNCONFIRMED  members go on before all have come into the world
GOAL_WORLD  a state that must be reached: two go on without the third
*/

#ifndef RANKS
#define RANKS 3
#endif
#ifdef NO_CHANGES
#define CHANGES 0
#else
#define CHANGES 1
#endif
#define ALL ((1 << RANKS) - 1)
#define NONE 255
#define in(rank, set) (((set) >> (rank)) & 1)
#define size(set) (in(0, set) + in(1, set) + in(2, set) + in(3, set))
#ifdef BROKEN_ALONE
#define ENOUGH(set) (size(set) >= 1)
#elif defined(MAJORITY)
#define ENOUGH(set) (2 * size(set) > RANKS)
#else
#define ENOUGH(set) (size(set) >= 2)
#endif

bit cut[RANKS * RANKS];
byte missed[RANKS];   /* whom each misses */
byte reports[RANKS];  /* on each board: who has reported there */
byte verdict[RANKS];  /* on each board */
byte letter[RANKS];   /* for each rank: the strongest that was left for it */
byte here[RANKS];     /* on each board: who has come to meet there */
byte members[RANKS];  /* on each board: who goes on together, or 0 */
byte made[RANKS];     /* on each board: who is ready to */
mtype = { UNKNOWN, YES, NO };
mtype outcome[RANKS] = UNKNOWN;  /* on each board: whether they do */
byte world[RANKS];    /* of each rank, 0 for none */
byte held[RANKS];     /* each rank's verdict */
byte voted = 0, done = 0;
bit healed = 0;

/* Whether `a` is the stronger verdict, or there is no other. */
#define lower(a, b) ((in(0, a) != in(0, b)) -> !in(0, a) : ((in(1, a) != in(1, b)) -> !in(1, a) : ((in(2, a) != in(2, b)) -> !in(2, a) : !in(3, a))))
#define stronger(a, b) ((b) == NONE || ((a) != NONE && (size(a) < size(b) || (size(a) == size(b) && (a) != (b) && lower(a, b)))))

inline take(into, other) {
    if
#ifdef BROKEN_FIRST
    :: into == NONE -> into = other
#else
    :: stronger(other, into) -> into = other
#endif
    :: else
    fi
}

inline lowest_reached(rank, without, host) {
    host = 0;
    do
    :: host != rank && (in(host, without) || cut[rank * RANKS + host]) -> host++
    :: else -> break
    od
}

/* Looks at all boards that are reached, and perhaps takes in a letter. */
inline look(rank, known, peer) {
    atomic {
#ifdef HEALS
        if
        :: letter[rank] != NONE -> take(verdict[rank], letter[rank]); letter[rank] = NONE
        :: skip
        fi;
#endif
        peer = 0;
        do
        :: peer < RANKS ->
            if
            :: peer == rank -> take(known, verdict[peer])
#ifdef BROKEN_ONLY_LOST
            :: peer != rank && (known == NONE || in(peer, known)) && !cut[rank * RANKS + peer] ->
#else
            :: peer != rank && !cut[rank * RANKS + peer] ->
#endif
                take(known, verdict[peer])
            :: else
            fi;
            peer++
        :: else -> peer = 0; break
        od
    }
}

proctype rank_(byte rank) {
    byte host = 0, seen = 0, known = NONE, lost, peer = 0;
    bit again = 0;

    /* Votes. */
    do
    :: atomic {
            lowest_reached(rank, 0, host);
            reports[host] = reports[host] | (1 << rank);
            seen = reports[host]
        };
        look(rank, known, peer);
        if
        :: known != NONE -> break
        :: known == NONE && ENOUGH(seen) ->
            atomic {
                lost = 0;
                do
                :: peer < RANKS -> lost = lost | (in(peer, seen) -> missed[peer] : 0); peer++
                :: else -> peer = 0; break
                od;
                lost = lost & ~seen;
#ifndef NO_CHANGES
                if
                :: cut[rank * RANKS + host] -> skip
                :: else -> take(verdict[host], lost); known = verdict[host]
                fi
#else
                take(verdict[host], lost); known = verdict[host]
#endif
            };
#ifndef NO_CHANGES
            if
            :: known != NONE -> break
            :: else
            fi
#else
            break
#endif
        :: known == NONE && !again -> again = 1  /* nobody has come yet, or time is not up */
        :: known == NONE && again -> break       /* the timeout is */
        fi
    od;
    host = 0; seen = 0; lost = 0; again = 0;
    look(rank, known, peer);
    if
    :: known != NONE && !in(rank, known) ->
        atomic {
            take(verdict[rank], known);
#ifdef HEALS
            do
            :: peer < RANKS -> if :: peer != rank -> take(letter[peer], known) :: else fi; peer++
            :: else -> peer = 0; break
            od
#endif
        }
    :: else
    fi;
    voted++;

#ifdef HEALS
    healed;
    look(rank, known, peer);
    held[rank] = known;
#else
    /* Meets the others. */
    look(rank, known, peer);
    held[rank] = known;
    if
    :: known != NONE && !in(rank, known) ->
        atomic {
            lowest_reached(rank, known, host);
            here[host] = here[host] | (1 << rank)
        };
        if
        :: members[host] == 0 && !cut[rank * RANKS + host] ->  /* time may be up */
            atomic {
                seen = here[host] & ~known;
                if
                :: members[host] == 0 && ENOUGH(seen) -> members[host] = seen
                :: else
                fi
            }
        :: skip
        fi;
        atomic {
            if
            :: members[host] != 0 && in(rank, members[host]) && !cut[rank * RANKS + host] ->
                made[host] = made[host] | (1 << rank)
            :: else -> host = NONE
            fi
        };
        if
        :: host == NONE
        :: host != NONE ->
            atomic {  /* all have made it, or time is up; what is said first holds */
                if
                :: outcome[host] == UNKNOWN -> outcome[host] = (made[host] == members[host] -> YES : NO)
                :: else
                fi;
                if
#ifdef BROKEN_UNCONFIRMED
                :: !cut[rank * RANKS + host] -> world[rank] = members[host]
#else
                :: outcome[host] == YES && !cut[rank * RANKS + host] -> world[rank] = members[host]
#endif
                :: else
                fi
            }
        fi
    :: else
    fi;
#endif
    done++
}

active proctype network() {
    byte changes = 0, a, b;

    atomic {
        a = 0;
        do
        :: a < RANKS ->
            verdict[a] = NONE; held[a] = NONE;
            letter[a] = NONE;
            missed[a] = ALL & ~(1 << a);
#ifdef HEALS
            if
            :: missed[a] = 1 << ((a + 1) % RANKS)
            :: skip
            fi;
#endif
            b = 0;
            do
            :: b < a ->
#ifndef UP
                if
                :: cut[a * RANKS + b] = 1; cut[b * RANKS + a] = 1
                :: skip
                fi;
#endif
                b++
            :: else -> break
            od;
            a++
        :: else -> break
        od;
        a = 0;
        do
        :: a < RANKS -> run rank_(a); a++
        :: else -> break
        od
    };
    do
#ifndef NO_CHANGES
    :: changes < CHANGES ->
        atomic {
            select(a : 1 .. RANKS - 1); select(b : 0 .. a - 1);
            cut[a * RANKS + b] = !cut[a * RANKS + b]; cut[b * RANKS + a] = cut[a * RANKS + b];
            changes++
        }
#endif
#ifdef HEALS
    :: voted == RANKS && !healed ->
        atomic {
            changes = CHANGES;
            a = 0;
            do
            :: a < RANKS * RANKS -> cut[a] = 0; a++
            :: else -> a = 0; break
            od;
            healed = 1
        }
#endif
    :: done == RANKS -> break
    od;
    a = 0;
    do
    :: a < RANKS ->
#ifdef HEALS
        b = 0;
        do
        :: b < RANKS ->
            assert(held[a] == held[b]);
            b++
        :: else -> break
        od;
#else
        if
        :: world[a] != 0 ->
            assert(in(a, world[a]) && size(world[a]) > 1);
            b = 0;
            do
            :: b < RANKS ->
                assert(!in(b, world[a]) || world[b] == world[a] || world[b] == 0);
#ifdef NO_CHANGES
                assert(!in(b, world[a]) || world[b] != 0);
#endif
#ifdef MAJORITY
                assert(world[b] == 0 || world[b] == world[a]);
#endif
                b++
            :: else -> break
            od
        :: else
        fi;
#endif
        a++
    :: else -> break
    od;
#ifdef GOAL_WORLD
    bool goal_reached = (world[0] == 3 && world[1] == 3 && world[2] == 0);
    assert(!(goal_reached));
#endif
}
