/* A network in userspace: one TUN device in each of several network namespaces, and packets carried between them with
 * a delay, a rate, loss, an MTU and cuts for each direction. For kernels without netem. Linux, root.
 *
 *     tun_router NAMESPACE...
 *
 * `-` is the namespace that it was started in. Host number i (from 0) has the address 10.77.0.(i + 1). Lines on
 * standard input set links; -1 is every host:
 *
 *     FROM TO DELAY_US RATE_BITS_PER_S LOSS_PER_MILLION QUEUE_BYTES MTU IS_UP SEED
 *
 * Each is answered by "ok" on standard output. A rate of 0 is no limit. A packet larger than the MTU vanishes without a
 * word, as in a black hole. The program ends when its standard input does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define DEVICE "kvasir0"

enum { MAX_HOSTS = 8, RING = 1 << 15, PACKET_BYTES = 1600, PACKETS_AT_ONCE = 128 };

struct packet {
    int64_t due_ns;
    int length;
    unsigned char bytes[PACKET_BYTES];
};

struct link {
    int64_t delay_ns, rate, free_at_ns, queue_bytes;
    int loss_per_million, mtu, is_up;
    uint64_t random;
    struct packet *ring;
    unsigned head, tail;
};

static struct link links[MAX_HOSTS][MAX_HOSTS];
static int devices[MAX_HOSTS], hosts, own_namespace;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

static int open_device(const char *namespace_name, int number) {
    char path[256], commands[300];
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace_name);
    int space = strcmp(namespace_name, "-") ? open(path, O_RDONLY | O_CLOEXEC) : dup(own_namespace);
    if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, DEVICE);
    if (device < 0 || ioctl(device, TUNSETIFF, &request)) fail("/dev/net/tun");
    snprintf(commands, sizeof commands,
             "ip link set lo up && ip address add 10.77.0.%d/24 dev " DEVICE " && ip link set " DEVICE
             " mtu 1500 txqueuelen 4000 up",
             number + 1);
    if (system(commands)) fail("ip");
    close(space);
    return device;
}

static void deliver(struct link *link, int device, int64_t now) {
    while (link->head != link->tail) {
        struct packet *packet = &link->ring[link->head % RING];
        if (packet->due_ns > now) return;
        if (link->is_up && write(device, packet->bytes, packet->length) < 0 && errno == EAGAIN) return;
        link->head++;
    }
}

static void receive(int from) {
    unsigned char bytes[PACKET_BYTES];
    for (int count = 0; count < PACKETS_AT_ONCE; count++) {
        int length = read(devices[from], bytes, sizeof bytes);
        if (length < 20) return;
        int to = bytes[19] - 1; /* the last byte of an IPv4 destination */
        if (bytes[0] >> 4 != 4 || to < 0 || to >= hosts || to == from) continue;
        struct link *link = &links[from][to];
        if (!link->is_up || length > link->mtu || link->tail - link->head >= RING) continue;
        if (link->loss_per_million && next_random(&link->random) % 1000000 < (unsigned)link->loss_per_million) continue;
        int64_t now = now_ns(), sent_at = link->free_at_ns > now ? link->free_at_ns : now;
        if (link->rate) {
            if ((sent_at - now) * link->rate / 8 / 1000000000LL > link->queue_bytes) continue;
            sent_at += length * 8LL * 1000000000LL / link->rate;
            link->free_at_ns = sent_at;
        }
        struct packet *packet = &link->ring[link->tail++ % RING];
        packet->due_ns = sent_at + link->delay_ns;
        packet->length = length;
        memcpy(packet->bytes, bytes, length);
    }
}

static void set_links(const char *line) {
    int from, to, loss, mtu, is_up;
    long long delay_us, rate, queue_bytes, seed;
    if (sscanf(line, "%d %d %lld %lld %d %lld %d %d %lld", &from, &to, &delay_us, &rate, &loss, &queue_bytes, &mtu,
               &is_up, &seed) != 9) {
        fprintf(stderr, "not a link: %s\n", line);
        exit(1);
    }
    for (int i = 0; i < hosts; i++)
        for (int j = 0; j < hosts; j++)
            if ((from < 0 || from == i) && (to < 0 || to == j)) {
                struct link *link = &links[i][j];
                link->delay_ns = delay_us * 1000, link->rate = rate, link->loss_per_million = loss;
                link->queue_bytes = queue_bytes, link->mtu = mtu, link->is_up = is_up;
                link->random = seed * 64 + i * MAX_HOSTS + j;
            }
    puts("ok");
    fflush(stdout);
}

static int read_commands(void) {
    static char buffer[4096];
    static int used;
    int length = read(0, buffer + used, sizeof buffer - used - 1);
    if (length <= 0) return 0;
    used += length;
    buffer[used] = 0;
    for (char *end; (end = strchr(buffer, '\n'));) {
        *end = 0;
        set_links(buffer);
        used -= end + 1 - buffer;
        memmove(buffer, end + 1, used + 1);
    }
    return 1;
}

int main(int count, char **arguments) {
    hosts = count - 1;
    if (hosts < 2 || hosts > MAX_HOSTS) return 2;
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, 9);
    own_namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < hosts; i++) devices[i] = open_device(arguments[i + 1], i);
    for (int i = 0; i < hosts; i++)
        for (int j = 0; j < hosts; j++) {
            links[i][j] = (struct link){.queue_bytes = 1 << 20, .mtu = 1500, .is_up = 1};
            if (i != j && !(links[i][j].ring = malloc(sizeof(struct packet) * RING))) fail("malloc");
        }
    puts("ok");
    fflush(stdout);
    for (;;) {
        struct pollfd waits[MAX_HOSTS + 1];
        for (int i = 0; i < hosts; i++) waits[i] = (struct pollfd){.fd = devices[i], .events = POLLIN};
        waits[hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
        int64_t now = now_ns(), next = now + 1000000000LL;
        for (int i = 0; i < hosts; i++)
            for (int j = 0; j < hosts; j++) {
                struct link *link = &links[i][j];
                if (link->head != link->tail && link->ring[link->head % RING].due_ns < next)
                    next = link->ring[link->head % RING].due_ns;
            }
        int64_t wait = next > now ? next - now : 0;
        struct timespec timeout = {wait / 1000000000LL, wait % 1000000000LL};
        ppoll(waits, hosts + 1, &timeout, NULL);
        if (waits[hosts].revents && !read_commands()) return 0;
        for (int i = 0; i < hosts; i++)
            if (waits[i].revents & POLLIN) receive(i);
        now = now_ns();
        for (int i = 0; i < hosts; i++)
            for (int j = 0; j < hosts; j++)
                if (i != j) deliver(&links[i][j], devices[j], now);
    }
}
