/*
 * The workload of `holdfast bench handlespace` on rsplib's handlespace management.
 *
 * Usage: rsplib POLICY ELEMENTS POOLS MILLISECONDS ROUNDS
 * Prints a line for each operation: name, operations per second, median nanoseconds, bytes per element.
 */
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "poolhandlespacemanagement.h"

#define TREE(name) TMPL_CLASS(name, SimpleRedBlackTree)
#define LIFE_US 30000000ULL
#define BATCH 4096
#define SAMPLES_MAX 65536
#define LEVELS 16

struct member { uint32_t pool, id; };
struct samples { double ns[SAMPLES_MAX]; size_t count; uint64_t operations, spent_ns; };

static struct TREE(PoolHandlespaceManagement) space;
static struct member *members;
static struct PoolHandle *handles;
static struct TransportAddressBlock *contact;
static struct TREE(HandleTableExtract) extract;
static uint32_t elements, pools, born, next_member;
static unsigned int policy_type;
static uint64_t now_us, state = 42;

static uint64_t random_number(void) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

static uint32_t below(uint32_t limit) { return (uint32_t)((random_number() >> 32) * limit >> 32); }

static uint32_t spread(uint32_t i) {
    uint32_t x = i * 0x9e3779b1u;
    x ^= x >> 15;
    x *= 0x85ebca77u;
    return x ^ x >> 13;
}

static uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

static void add_sample(struct samples *s, uint64_t start, uint64_t operations) {
    uint64_t spent = clock_ns() - start;
    s->spent_ns += spent;
    s->operations += operations;
    if(s->count < SAMPLES_MAX) s->ns[s->count++] = (double)spent / (double)operations;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct PoolPolicySettings figure(void) {
    struct PoolPolicySettings settings;
    poolPolicySettingsNew(&settings);
    uint32_t level = below(LEVELS);
    settings.PolicyType = policy_type;
    settings.Load = level * (0xffffffffu / LEVELS);
    settings.Weight = level + 1;
    settings.LoadDegradation = 1 << 20;
    settings.LoadDPF = settings.WeightDPF = 1 << 22;
    settings.Distance = below(LEVELS) * 10;
    if(policy_type == PPT_ROUNDROBIN || policy_type == PPT_RANDOM) settings.Weight = 1;
    if(policy_type != PPT_LEASTUSED_DPF && policy_type != PPT_WEIGHTED_RANDOM_DPF) settings.Distance = 0;
    return settings;
}

static struct TREE(PoolElementNode) *put(struct member m, const struct PoolPolicySettings *settings) {
    struct TREE(PoolElementNode) *node;
    unsigned int error = TREE(poolHandlespaceManagementRegisterPoolElement)(
        &space, &handles[m.pool], 1, m.id, 30000, settings, contact, contact, -1, 0, now_us, &node);
    if(error != RSPERR_OKAY) { fprintf(stderr, "registration: error %u\n", error); exit(1); }
    return node;
}

static struct TREE(PoolElementNode) *find(struct member m) {
    return TREE(poolHandlespaceManagementFindPoolElement)(&space, &handles[m.pool], m.id);
}

static void set_timer(struct TREE(PoolElementNode) *node, uint64_t at_us) {
    TREE(poolHandlespaceNodeDeactivateTimer)(&space.Handlespace, node);
    TREE(poolHandlespaceNodeActivateTimer)(&space.Handlespace, node, PENT_EXPIRY, at_us);
}

static uint64_t expire(void) {
    struct TREE(PoolElementNode) *node = TREE(poolHandlespaceNodeGetFirstPoolElementTimerNode)(&space.Handlespace);
    uint64_t at = node->TimerTimeStamp;
    set_timer(node, at + LIFE_US);
    return at;
}

/* Returns up to `count` next elements of the random order; shuffles the order again at its end. */
static uint32_t batch(uint32_t count, struct member **first) {
    if(next_member == elements) {
        for(uint32_t i = elements - 1; i > 0; i--) {
            uint32_t j = below(i + 1);
            struct member m = members[i];
            members[i] = members[j];
            members[j] = m;
        }
        next_member = 0;
    }
    *first = &members[next_member];
    if(count > elements - next_member) count = elements - next_member;
    next_member += count;
    return count;
}

static uint32_t batch_length(void) {
    uint32_t length = elements / 8 < BATCH ? elements / 8 : BATCH;
    return length ? length : 1;
}

static void exchange(struct samples *in, struct samples *out) {
    static struct PoolPolicySettings figures[BATCH];
    struct member *m;
    uint32_t count = batch(batch_length(), &m);
    uint64_t start = clock_ns();
    for(uint32_t i = 0; i < count; i++)
        TREE(poolHandlespaceManagementDeregisterPoolElement)(&space, &handles[m[i].pool], m[i].id);
    add_sample(out, start, count);
    for(uint32_t i = 0; i < count; i++) {
        m[i].id = spread(born++);
        figures[i] = figure();
    }
    uint64_t step = LIFE_US / count;
    start = clock_ns();
    for(uint32_t i = 0; i < count; i++)
        set_timer(put(m[i], &figures[i]), now_us + (i + 1) * step);
    add_sample(in, start, count);
}

static void reregister(struct samples *s) {
    static struct PoolPolicySettings figures[BATCH];
    struct member *m;
    uint32_t count = batch(batch_length(), &m);
    for(uint32_t i = 0; i < count; i++) figures[i] = figure();
    uint64_t start = clock_ns();
    for(uint32_t i = 0; i < count; i++) put(m[i], &figures[i]);
    add_sample(s, start, count);
}

static void timer_restart(struct samples *s) {
    struct member *m;
    uint32_t count = batch(batch_length(), &m);
    uint64_t step = LIFE_US / 3 / elements;
    uint64_t start = clock_ns();
    for(uint32_t i = 0; i < count; i++) {
        now_us += step;
        set_timer(find(m[i]), now_us + LIFE_US);
        if(TREE(poolHandlespaceManagementGetNextTimerTimeStamp)(&space) <= now_us) abort();
    }
    add_sample(s, start, count);
}

static void timer_expire(struct samples *s) {
    uint32_t count = batch_length();
    uint64_t start = clock_ns();
    for(uint32_t i = 0; i < count; i++) now_us = expire();
    add_sample(s, start, count);
}

static void resolve(struct samples *s, size_t items) {
    static uint32_t choice[BATCH];
    struct TREE(PoolElementNode) *nodes[3];
    volatile uint32_t ids[3];
    for(uint32_t i = 0; i < BATCH; i++) choice[i] = below(pools);
    uint64_t start = clock_ns();
    for(uint32_t i = 0; i < BATCH; i++) {
        size_t count = items;
        TREE(poolHandlespaceManagementHandleResolution)(&space, &handles[choice[i]], nodes, &count, items, 1);
        for(size_t k = 0; k < count; k++) ids[k] = nodes[k]->Identifier;
    }
    (void)ids;
    add_sample(s, start, BATCH);
}

static void synchronize(struct samples *s) {
    volatile uint32_t digest = 0;
    unsigned int flags = HTEF_START;
    uint64_t start = clock_ns(), count = 0;
    while(TREE(poolHandlespaceManagementGetHandleTable)(&space, 1, &extract, flags, NTE_MAX_POOL_ELEMENT_NODES) > 0) {
        for(size_t i = 0; i < extract.PoolElementNodes; i++) {
            const struct TREE(PoolElementNode) *node = extract.PoolElementNodeArray[i];
            digest ^= node->Identifier ^ node->HomeRegistrarIdentifier ^ node->UserTransport->Port;
        }
        count += extract.PoolElementNodes;
        flags = 0;
    }
    if(count != elements) { fprintf(stderr, "synchronised %lu\n", (unsigned long)count); exit(1); }
    add_sample(s, start, count);
}

static unsigned int policy_by_name(const char *name) {
    static const struct { const char *name; unsigned int type; } policies[] = {
        {"RR", PPT_ROUNDROBIN}, {"WRR", PPT_WEIGHTED_ROUNDROBIN}, {"RAND", PPT_RANDOM},
        {"WRAND", PPT_WEIGHTED_RANDOM}, {"PRIO", PPT_PRIORITY}, {"LU", PPT_LEASTUSED},
        {"LUD", PPT_LEASTUSED_DEGRADATION}, {"PLU", PPT_PRIORITY_LEASTUSED},
        {"RLU", PPT_RANDOMIZED_LEASTUSED}, {"LU-DPF", PPT_LEASTUSED_DPF},
        {"WRAND-DPF", PPT_WEIGHTED_RANDOM_DPF},
    };
    for(size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++)
        if(strcmp(policies[i].name, name) == 0) return policies[i].type;
    fprintf(stderr, "rsplib has no policy %s\n", name);
    exit(1);
}

static double set_up(void) {
    size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    TREE(poolHandlespaceManagementNew)(&space, 1, NULL, NULL, NULL);
    members = malloc(elements * sizeof(*members));
    handles = malloc(pools * sizeof(*handles));
    union sockaddr_union address;
    memset(&address, 0, sizeof(address));
    address.sa.sa_family = AF_INET;
    contact = malloc(transportAddressBlockGetSize(1));
    transportAddressBlockNew(contact, IPPROTO_SCTP, 80, 0, &address, 1, 1);
    for(uint32_t i = 0; i < pools; i++) {
        char name[32];
        snprintf(name, sizeof(name), "pool %06u", i);
        poolHandleNew(&handles[i], (unsigned char *)name, strlen(name));
    }
    for(uint32_t i = 0; i < elements; i++) members[i] = (struct member){ i % pools, spread(i + 1) };
    born = elements + 1;
    next_member = elements;
    struct member *m;
    uint32_t count = batch(elements, &m);
    for(uint32_t i = 0; i < count; i++) {
        struct PoolPolicySettings settings = figure();
        set_timer(put(m[i], &settings), LIFE_US * i / elements);
    }
    size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
    size_t own = elements * sizeof(*members) + pools * sizeof(*handles);
    return (double)(after - before - own) / elements;
}

int main(int argc, char **argv) {
    static const char *names[] = { "register", "deregister", "reregister", "timer_restart",
                                   "timer_expire", "resolve_1", "resolve_3", "synchronize" };
    static struct samples s[8];
    double best[8] = { 0 }, median[8] = { 0 };
    if(argc != 6) return 2;
    policy_type = policy_by_name(argv[1]);
    elements = (uint32_t)atol(argv[2]);
    pools = (uint32_t)atol(argv[3]);
    uint64_t duration_ns = (uint64_t)atol(argv[4]) * 1000000ULL;
    double bytes = set_up();
    for(uint32_t i = 0; i < elements; i++) now_us = expire();
    for(uint32_t i = 0; i < 2 * (elements / batch_length()); i++) exchange(&s[0], &s[1]);
    for(int round = 0; round < atoi(argv[5]); round++) {
        memset(s, 0, sizeof(s));
        while(s[0].spent_ns < duration_ns || s[1].spent_ns < duration_ns) exchange(&s[0], &s[1]);
        while(s[2].spent_ns < duration_ns) reregister(&s[2]);
        for(uint32_t i = 0; i < elements; i++) set_timer(find(members[i]), now_us + LIFE_US);
        while(s[3].spent_ns < duration_ns) timer_restart(&s[3]);
        while(s[4].spent_ns < duration_ns) timer_expire(&s[4]);
        while(s[5].spent_ns < duration_ns) resolve(&s[5], 1);
        while(s[6].spent_ns < duration_ns) resolve(&s[6], 3);
        while(s[7].spent_ns < duration_ns) synchronize(&s[7]);
        for(int k = 0; k < 8; k++) {
            double rate = (double)s[k].operations * 1e9 / (double)s[k].spent_ns;
            if(rate > best[k]) {
                best[k] = rate;
                qsort(s[k].ns, s[k].count, sizeof(double), by_value);
                median[k] = s[k].ns[s[k].count / 2];
            }
        }
    }
    for(int k = 0; k < 8; k++) printf("%s %.1f %.2f %.1f\n", names[k], best[k], median[k], bytes);
    return 0;
}
