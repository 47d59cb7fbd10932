/*
 * Code that reports wait events the way PostgreSQL does, shaped to be hard on the site
 * finder: compiled in several ways by tests/test_sites.py, and run by nobody. With MEMBER
 * defined as versions 10 to 13 do it, through MyProc.
 */
#include <stdint.h>
#include <stdlib.h>

int64_t PgStartTime;
volatile int sink;

struct object {
    int (*method)(struct object *, int);
    uint32_t event;
};

#ifdef MEMBER
const char version[] = "postgres (PostgreSQL) 12.0";

struct process {
    struct process *next, *before;
    struct { int set, pid; } latch;
    uint32_t count, xids[64];
    char in_group;
    uint32_t group_xid, wait_event_info, state, more[20];
};
struct process *MyProc, *first, *startup;
char pgstat_track_activities;

static inline void report(uint32_t info) {
    volatile struct process *proc = MyProc;
    if (!pgstat_track_activities || !proc)
        return;
    proc->wait_event_info = info;
}
static inline void start(uint32_t info) { report(info); }
static inline void end(void) { report(0); }

__attribute__((noinline)) static void link_to(struct process **p, struct process *q) { *p = q; }

/* Copies of the pointer everywhere, and all that else is done with it. */
void set_storage(uint32_t *info) {
    MyProc = first;
    MyProc->latch.set = 0;
    MyProc->latch.pid = *info;
    MyProc->in_group = 0;
    MyProc->group_xid = 0;
    MyProc->wait_event_info = 0;
    startup = MyProc;
    MyProc->next = MyProc->before = (struct process *)&MyProc->next;
    link_to(&MyProc->before, MyProc);
    for (uint32_t i = 0; i < MyProc->count; i++)
        MyProc->xids[i] = *info + i;
    for (uint32_t *x = MyProc->more; x < MyProc->more + 20; x++)
        *x = x[*info];
}
void reset_storage(void) {
    struct process *leader = MyProc->next ? MyProc->next : MyProc;
    leader->state = 1;
    first = MyProc;
    MyProc = NULL;
}
#else
const char version[] = "postgres (PostgreSQL) 15.0";

static uint32_t local_wait_event_info;
uint32_t *my_wait_event_info = &local_wait_event_info;

static inline void start(uint32_t info) { *(volatile uint32_t *)my_wait_event_info = info; }
static inline void end(void) { *(volatile uint32_t *)my_wait_event_info = 0; }

void set_storage(uint32_t *info) { my_wait_event_info = info; }
void reset_storage(void) { my_wait_event_info = &local_wait_event_info; }
#endif

/* Known to change one register only, so the caller keeps values in others over the call. */
__attribute__((noinline)) static int work(int x) { return sink = x * 3; }
__attribute__((noinline)) static void nothing(void) { sink = 1; }
__attribute__((noinline, noreturn, cold)) static void fail(int x) { exit(x); }

/* A jump table between a start and whatever comes next, and starts that it leads to. */
int switched(struct object *o, int x) {
    start(0x9000001);
    switch (x) {
    case 0: start(0x9000002); x = work(x); break;
    case 1: end(); /* fall through */
    case 2: start(o->event); nothing(); end(); break;
    case 3: x += 7; /* fall through */
    case 4: start(0x9000003); return x;
    case 5: end(); return o->method(o, x);
    case 6: fail(x);
    default: start(0x5000000 | (x & 255));
    }
    end();
    return x;
}

/* The pointer may be loaded before the branch, the value after; the end before the next start. */
int branched(struct object *o, int x, int y) {
    uint32_t info = x > 3 ? 0x8000001 : o->event;
    nothing();
    if (y == 77)
        start(0x8000002);
    else if (y == 78)
        start(info);
    else
        start(x + y);
    end();
    start(info);
    x = work(x);
    end();
    if (x == -1)
        fail(x);
    return x;
}

/* Enough at once to fill the registers. */
int crowded(int *a, int x, int y, int z) {
    int b = a[x], c = a[y], d = a[z], e = b * c, f = c * d, g = d * b, h = x * y, i = y * z;
    for (int n = 0; n < x; n++) {
        start(0xa000001 + n);
        a[n] = b + c * d - e + f * g + h - i * n;
        b ^= a[n + 1];
        c += work(b);
        end();
        if ((a[n] & 7) == 7)
            start(b);
        d -= e + h;
    }
    end();
    return b + c + d + e + f + g + h + i;
}

/* As file access does it: plenty of constants. */
int plain(struct object *o, int x) {
    start(0xa000011);
    x = o->method(o, x);
    end();
    start(0xa000012);
    x += o->method(o, x);
    end();
    start(0xa000013);
    x -= o->method(o, x);
    end();
    start(0x6000000);
    x ^= o->method(o, x);
    end();
    return x;
}

/* No store before the call that ends it: the probe must not move to another function's code. */
int tail(struct object *o, int x) {
    sink = x;
    end();
    return o->method(o, x);
}

int main(int argc, char **argv) {
    static struct object o = {switched, 0x7000001};
    int a[4] = {argc, 1, 2, 3};
    (void)argv;
    set_storage(&o.event);
    x:
    if (tail(&o, branched(&o, switched(&o, argc), crowded(a, 1, 2, plain(&o, 3)))) == 12345)
        goto x;
    reset_storage();
    return 0;
}
