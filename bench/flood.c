/*
 * A server without a database: it makes transitions, at a known rate, and counts them.
 *
 * usage: postmaster CHILDREN WAITS RATE      in a folder of its own, as its data directory
 *
 * waitfold-record takes it for a server: it has a version, the two globals and a postmaster.pid. Its
 * two stores are those of pgstat_report_wait_start and _end. Each child waits for a SIGUSR1, makes
 * WAITS waits, RATE a second (0: as fast as it can) in a burst each millisecond, as a backend
 * does that now and then has nothing to do, prints its pid, how many transitions that were, and
 * how many ns of time and of CPU they took, and waits for another SIGUSR1 to end.
 *
 * With -DPROBES it has the wait__event probes as well, where a patched server has them.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef PROBES
#include <sys/sdt.h>
#else
#define DTRACE_PROBE(provider, name)
#define DTRACE_PROBE1(provider, name, argument)
#endif

const char version[] = "postgres (PostgreSQL) 15.18";
int64_t PgStartTime;
static uint32_t local;
uint32_t *my_wait_event_info = &local;

#define PG_WAIT_DATA_FILE_READ 0x0A00000EU

static int64_t now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static __attribute__((noinline)) void work(void)
{
	__asm__ volatile("" ::: "memory");
}

/* Two stores through the pointer, each with a call behind it, as in the server. */
static void wait_once(void)
{
	*(volatile uint32_t *) my_wait_event_info = PG_WAIT_DATA_FILE_READ;
	DTRACE_PROBE1(postgresql, wait__event__start, PG_WAIT_DATA_FILE_READ);
	work();
	*(volatile uint32_t *) my_wait_event_info = 0;
	DTRACE_PROBE(postgresql, wait__event__end);
	work();
}

static void make(long waits, long rate)
{
	const struct timespec pause = {0, 1000000};
	const int64_t begun = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID);
	int64_t due;

	for (long made = 0; made < waits;)
	{
		due = rate ? (now(CLOCK_MONOTONIC) - begun) * rate / 1000000000 : waits;
		for (; made < due && made < waits; made++)
			wait_once();
		if (made < waits)
			nanosleep(&pause, NULL);
	}
	printf("%d\t%ld\t%lld\t%lld\n", (int) getpid(), 2 * waits,
		   (long long) (now(CLOCK_MONOTONIC) - begun),
		   (long long) (now(CLOCK_PROCESS_CPUTIME_ID) - used));
	fflush(stdout);
}

int main(int argc, char **argv)
{
	sigset_t go;
	struct timespec t;
	uint32_t *slots;
	int signal;
	FILE *file;

	if (argc != 4)
		return 2;
	slots = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (slots == MAP_FAILED)
		return 1;
	clock_gettime(CLOCK_REALTIME, &t);
	PgStartTime = t.tv_sec * INT64_C(1000000) + t.tv_nsec / 1000;
	sigemptyset(&go);
	sigaddset(&go, SIGUSR1);
	sigprocmask(SIG_BLOCK, &go, NULL);
	for (int i = 0; i < atoi(argv[1]); i++)
		if (fork() == 0)
		{
			my_wait_event_info = slots + i;
			sigwait(&go, &signal);
			make(atol(argv[2]), atol(argv[3]));
			sigwait(&go, &signal);
			return 0;
		}
	file = fopen("postmaster.pid", "w");
	fprintf(file, "%d\n", (int) getpid());
	fclose(file);
	while (wait(NULL) > 0)
		;
	return 0;
}
