/* The commit of one step, for an exhaustive check with Spin: docs/commit-model.md says how its
 * parts map to the code. Two starts of a job (attempts 1 and 2) save the same step from N nodes,
 * two committers race, one deleter may follow; anything may die between any two steps.
 *
 * Each of these flags makes one known mistake, and Spin must find it:
 *   MANIFEST_FIRST     the manifest before the index and the state
 *   COUNT_NOT_SET      records are counted: one node's, read twice, stands for two nodes'
 *   DELETE_DATA_FIRST  data, records, then the manifest
 *   OVERWRITE          a create that replaces what is there
 *   TRUST_LOST_REPLY   a lost reply is a failure, and its attempt's objects are cleaned away
 *   EXISTS_IS_OURS     "there is one already" is success, whoever's it is
 *   GIVE_UP            a lost reply is never tried again (breaks liveness only)
 *   NO_WITHDRAWAL      a committer does not look whether the step was deleted meanwhile
 *   NO_LAST_LOOK       a deleter does not look whether the step was committed meanwhile
 *
 * QUIET lets a deleter begin only while nobody commits the step: then nothing half is seen at any
 * moment. Without it, a manifest may stand for moments whose data is going, but not in the end.
 */

#ifndef N
#define N 2		/* nodes */
#endif
#ifndef KILLS
#define KILLS 1		/* deaths that are followed by a restart */
#endif
#ifndef LOSSES
#define LOSSES 1	/* replies to creates that are lost */
#endif
#ifdef COUNT_NOT_SET
#define PATIENCE 2	/* to read one record twice takes two polls */
#endif
#ifndef PATIENCE
#define PATIENCE 1	/* polls of a committer for records that are not all there yet */
#endif

#define ALL		((1 << N) - 1)
#define BIT(n)		(1 << (n))
#define NONE		0	/* no attempt; attempts are 1 and 2 */
#define WHOLE(a)	(shards[a] == ALL && records[a] == ALL && index[a])

#define COMMITTED	1
#define EXISTS		2
#define UNKNOWN		3

/* The store: sets of nodes as bits, for each attempt, since every key but one names it. */
byte shards[3], records[3];
bool index[3];		/* the index and the state: written, named and deleted alike */
byte manifest = NONE;	/* whose manifest stands: the one key that attempts share */

byte made = 0;		/* whose manifests were ever made, as bits: stays when they are deleted */
byte flight[2];		/* creates whose sender has given up waiting and that may still land */
bool busy[2];		/* a committer is between its first look and its verdict */
bool crashed = false;	/* the first start of the job has ended: there may be a second one */
byte victim = NONE;	/* whose manifest the deleter took, once it has begun */
bool looked = false;	/* and has had its last look */
bool deleted = false;	/* and is done */
bool twice = false;	/* a second thing went wrong behind it: see docs/commit-model.md */
byte kills = KILLS, losses = LOSSES;

/* Only inside atomic. A manifest is never replaced, and made anew only when a deleter took it. */
inline land(whose) {
#ifdef OVERWRITE
	assert(manifest == NONE);
	manifest = whose;
	made = made | BIT(whose)
#else
	if
	:: manifest == NONE -> assert(!made || victim); manifest = whose; made = made | BIT(whose)
	:: else
	fi
#endif
}

/* An alternative of a choice: death here, and a new start from what the store holds. */
#define DEATH	atomic { kills > 0 -> kills--; goto start }
/* The same where what was made may have to be taken back, and nobody is left to do it. */
#define LATE_DEATH	atomic { kills > 0 -> kills--; twice = twice || looked; goto start }

/* A node of an attempt: shard, then record. After a death, even one right after the record, it does
 * all of it again: the same bytes under the same names. A node of the first start may also be lost
 * for good. The trainers' deaths are init's: the agents, which are the nodes here, live on. */
proctype Node(byte a; byte n) {
#define LOST_NODE atomic { a == 1 -> crashed = true; goto lost }
start:
end_start:
	if
	:: atomic { a == 1 || crashed -> shards[a] = shards[a] | BIT(n) }
	:: LOST_NODE
	fi;
	if
	:: atomic { records[a] = records[a] | BIT(n); twice = twice || victim == a }
	:: LOST_NODE
	:: DEATH
	:: atomic { kills > 0 -> kills--; records[a] = records[a] | BIT(n);
		twice = twice || victim == a; goto start }
	fi;
lost:
	skip
}

#ifdef COUNT_NOT_SET
#define GATHERED	(count >= N)
#else
#define GATHERED	(found == ALL)
#endif

proctype Committer(byte c) {
	byte a, n, found, count, answer;
	byte patience = PATIENCE;
start:
	atomic { busy[c] = false; a = NONE; n = 0; found = 0; count = 0; answer = 0 };

	/* Waits for an attempt's records as they come, or finishes one whose records are all there.
	 * No try begins behind a deleter: a step that is not newer than the newest is left alone. */
end_pick:
	if
	:: atomic { !victim && records[1] && patience > 0 -> patience--; a = 1; busy[c] = true }
	:: atomic { !victim && records[2] && patience > 0 -> patience--; a = 2; busy[c] = true }
	:: atomic { !victim && records[1] == ALL -> a = 1; busy[c] = true }
	:: atomic { !victim && records[2] == ALL -> a = 2; busy[c] = true }
	fi;

	/* Nodes are asked one by one. What was found stays found when it has to ask again. */
gather:
	do
	:: atomic { n < N && (records[a] & BIT(n)) -> found = found | BIT(n);
#ifdef COUNT_NOT_SET
		count++;
#endif
		n++ }
	:: atomic { n < N && !(records[a] & BIT(n)) -> n++ }
	:: atomic { n == N && GATHERED -> n = 0; break }
	:: atomic { n == N && !GATHERED && patience > 0 -> patience--; n = 0 }
	:: atomic { n == N && !GATHERED -> goto start }	/* the deadline */
	:: DEATH
	od;

	/* Only the records that it has name shards to look for. */
	if
	:: atomic { (shards[a] & found) == found -> found = 0; count = 0 }
	:: atomic { (shards[a] & found) != found -> goto start }
	:: DEATH
	fi;

#ifndef MANIFEST_FIRST
	if
	:: index[a] = true
	:: DEATH
	fi;
#endif
	if
#ifdef OVERWRITE
	:: atomic { land(a); answer = COMMITTED }
#else
	:: atomic { manifest == NONE -> land(a); answer = COMMITTED }
	:: atomic { manifest != NONE -> answer = EXISTS }
#endif
	:: atomic { losses > 0 -> losses--; answer = UNKNOWN; land(a) }
	:: atomic { losses > 0 -> losses--; answer = UNKNOWN }
	:: atomic { losses > 0 && flight[c] == NONE -> losses--; answer = UNKNOWN; flight[c] = a }
	:: DEATH
	fi;
#ifdef MANIFEST_FIRST
	index[a] = true;
#endif

#ifdef TRUST_LOST_REPLY
	if
	:: atomic { answer == UNKNOWN -> records[a] = 0 };
		shards[a] = 0;
		goto start
	:: answer != UNKNOWN
	fi;
#endif
#ifdef GIVE_UP
	if
	:: atomic { answer == UNKNOWN -> goto done }
	:: answer != UNKNOWN
	fi;
#endif
#ifdef EXISTS_IS_OURS
	if
	:: atomic { answer == EXISTS -> answer = COMMITTED }
	:: answer != EXISTS
	fi;
#endif

	/* What is reported as a success was made, by this committer or by one of the same attempt. */
	if
	:: atomic { answer == COMMITTED -> assert(made & BIT(a)) }
	:: atomic { answer != COMMITTED && manifest == a -> assert(made & BIT(a)) }
	:: atomic { answer != COMMITTED && manifest != a && manifest != NONE -> goto done }	/* lost */
	:: atomic { answer != COMMITTED && manifest == NONE -> goto start }	/* still unknown */
	:: LATE_DEATH
	fi;

#ifndef NO_WITHDRAWAL
	/* A deleter that has gone by since the records were read would not come again. */
	if
	:: atomic { (records[a] & BIT(0)) -> goto done }
	:: atomic { !(records[a] & BIT(0)) }
	:: LATE_DEATH
	fi;
	if
	:: atomic { manifest != a -> goto done }
	:: atomic { manifest == a }
	:: LATE_DEATH
	fi;
	if
	:: atomic { manifest = NONE }
	:: LATE_DEATH
	fi;
#endif
done:
	atomic { busy[c] = false; a = NONE; found = 0; count = 0; answer = 0 }
}

/* A create that was under way when its sender stopped waiting reaches the store after all. */
active proctype Network() {
end_idle:
	do
	:: atomic { flight[0] != NONE -> land(flight[0]); flight[0] = NONE; twice = twice || looked }
	:: atomic { flight[1] != NONE -> land(flight[1]); flight[1] = NONE; twice = twice || looked }
	od
}

#ifdef QUIET
#define MAY_BEGIN	(!busy[0] && !busy[1] && flight[0] == NONE && flight[1] == NONE)
#else
#define MAY_BEGIN	true
#endif

/* Retention or prune: takes a committed step once a newer one is committed, at any time after.
 * To die half-way is to stop here. */
active proctype Deleter() {
	byte a, n;
end_wait:
	atomic {
		manifest != NONE && MAY_BEGIN
		-> victim = manifest; a = manifest
	};
#ifndef DELETE_DATA_FIRST
	manifest = NONE;
#else
	do
	:: atomic { n < N -> shards[a] = shards[a] & ~BIT(n); n++ }
	:: atomic { n == N -> n = 0; break }
	od;
#endif
	do
	:: atomic { n < N -> records[a] = records[a] & ~BIT(n); n++ }
	:: atomic { n == N -> n = 0; break }
	od;
	index[a] = false;
#ifdef DELETE_DATA_FIRST
	manifest = NONE;
#else
	do
	:: atomic { n < N -> shards[a] = shards[a] & ~BIT(n); n++ }
	:: atomic { n == N -> n = 0; break }
	od;
#endif
	/* A committer that was under way all the time may have made another. */
#ifndef NO_LAST_LOOK
	if
	:: atomic { manifest == a -> looked = true };
		manifest = NONE
	:: atomic { manifest != a -> looked = true }
	fi;
#endif
	atomic { looked = true; deleted = true; a = NONE }
}

init {
	byte n;
	atomic {
		do
		:: n < N -> run Node(1, n); run Node(2, n); n++
		:: n == N -> break
		od;
		n = 0;
		/* Whether the first start's trainers die after they staged: a second one then comes. */
		if
		:: crashed = true
		:: skip
		fi;
		run Committer(0);
		run Committer(1)
	}
}

#define SOUND	(manifest == NONE || (manifest == 1 && WHOLE(1)) || (manifest == 2 && WHOLE(2)))
#define AT_REST	(deleted && !busy[0] && !busy[1] && flight[0] == NONE && flight[1] == NONE)

/* A manifest that stands names only what is there, at every moment, deletes included (QUIET). */
ltl complete_or_absent { [] SOUND }

/* The same in the end, and until a deleter begins, whenever it begins. */
ltl complete_or_absent_in_the_end { [] ((victim && (!AT_REST || twice)) || SOUND) }

/* With deaths and lost replies bounded, and whoever can go on going on, the step is committed. */
ltl committed { <> (made != 0) }
