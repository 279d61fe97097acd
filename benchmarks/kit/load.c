// A load client for chat completions: closed loop, keep-alive, one epoll thread, aware of event streams.
//
//   load PORT BODIES --connections C --requests N --stamp S
//
// C connections to 127.0.0.1:PORT send the files of the folder BODIES in order of their names, over and over, N requests
// in all; each connection sends its next one when its last one was answered. The ten digits behind "stamp:" in a body
// are overwritten with S + how often the folder has been gone through, so that no text comes twice in a run.
//
// Prints one line of JSON: how many were answered with 200 ("ok"), failed, or ended without [DONE] ("incomplete"), chunks
// received, seconds, and the median time of a request, to its first chunk, and of a chunk on its way, in microseconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BODIES = 4096, MAX_EVENTS = 512, HEAD_SIZE = 16384, LINE_SIZE = 4096, STAMP_DIGITS = 10 };
static const long long HARD_STOP_NS = 120000000000ll;  // a run that takes longer has hung

typedef struct {
  char *bytes;  // the whole HTTP request
  size_t length, stamp_at;
  int is_stream;
} Request;

typedef struct {
  double *values;
  size_t count, capacity;
} Samples;

// What the next byte of an answer belongs to.
typedef enum { HEAD, BODY_BY_LENGTH, BODY_TO_END, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER } Place;

typedef struct {
  int fd, connecting, wants_write, reused, done_seen, close_after, status;
  const Request *request;
  char *bytes;  // the request as sent, stamped
  size_t capacity, sent, chunks;
  long long started_ns, left;
  Place place;
  char head[HEAD_SIZE], line[LINE_SIZE];
  size_t head_length, line_length;
} Connection;

static int poller, port, request_count;
static Request requests[MAX_BODIES];
static long long wanted, started, finished, failed, incomplete, chunks, stamp;
static Samples request_us, first_chunk_us, chunk_delay_us;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void add(Samples *samples, double value) {
  if (samples->count == samples->capacity) {
    samples->capacity = samples->capacity ? 2 * samples->capacity : 4096;
    samples->values = realloc(samples->values, samples->capacity * sizeof(double));
  }
  samples->values[samples->count++] = value;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(Samples *samples) {
  if (!samples->count) return -1;
  qsort(samples->values, samples->count, sizeof(double), ascending);
  return samples->values[samples->count / 2];
}

static int is_body(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void read_bodies(const char *folder) {
  struct dirent **entries;
  int count = scandir(folder, &entries, is_body, alphasort);
  if (count <= 0 || count > MAX_BODIES) die(folder);
  for (int i = 0; i < count; i++) {
    char path[4096], head[512];
    snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    size_t length = ftell(file);
    rewind(file);
    int n = snprintf(head, sizeof head,
                     "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept: */*\r\nuser-agent: load/1\r\n"
                     "authorization: Bearer sk-1234\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                     port, length);
    Request *request = &requests[request_count++];
    request->length = n + length;
    request->bytes = malloc(request->length);
    memcpy(request->bytes, head, n);
    if (fread(request->bytes + n, 1, length, file) != length) die(path);
    fclose(file);
    char *mark = memmem(request->bytes, request->length, "stamp:", 6);
    request->stamp_at = mark ? (size_t)(mark + 6 - request->bytes) : 0;
    request->is_stream = memmem(request->bytes, request->length, "\"stream\":true", 13) != NULL;
  }
}

static void want_write(Connection *c, int wants, int operation) {
  if (operation == EPOLL_CTL_MOD && c->wants_write == wants) return;
  c->wants_write = wants;
  struct epoll_event event = {.events = EPOLLIN | (wants ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, operation, c->fd, &event);
}

static void disconnect(Connection *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
}

static void begin(Connection *c);

static void finish(Connection *c, int ok) {
  finished++;
  if (!ok || c->status != 200) {
    failed++;
  } else {
    add(&request_us, (now_ns() - c->started_ns) / 1e3);
    if (c->request->is_stream && !c->done_seen) incomplete++;
  }
  if (!ok || c->close_after) disconnect(c);
  c->request = NULL;
  begin(c);
}

static void send_rest(Connection *c) {
  while (c->sent < c->request->length) {
    ssize_t n = send(c->fd, c->bytes + c->sent, c->request->length - c->sent, MSG_NOSIGNAL);
    if (n >= 0) {
      c->sent += n;
    } else {
      if (errno == EAGAIN) want_write(c, 1, EPOLL_CTL_MOD);
      else finish(c, 0);
      return;
    }
  }
  want_write(c, 0, EPOLL_CTL_MOD);
}

static void start_sending(Connection *c) {
  c->sent = c->chunks = c->head_length = c->line_length = c->done_seen = c->close_after = c->status = 0;
  c->place = HEAD;
  if (c->fd >= 0) {
    c->reused = 1;
    send_rest(c);
    return;
  }
  int one = 1;
  struct sockaddr_in to = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
  c->reused = 0;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) die("load: connect");
  c->connecting = 1;
  want_write(c, 1, EPOLL_CTL_ADD);
}

// The next request of the round, unless all have been sent.
static void begin(Connection *c) {
  if (started >= wanted) return;
  const Request *request = c->request = &requests[started % request_count];
  if (c->capacity < request->length) c->bytes = realloc(c->bytes, c->capacity = request->length);
  memcpy(c->bytes, request->bytes, request->length);
  if (request->stamp_at) {
    char digits[24];
    snprintf(digits, sizeof digits, "%0*lld", STAMP_DIGITS, (stamp + started / request_count) % 10000000000ll);
    memcpy(c->bytes + request->stamp_at, digits, STAMP_DIGITS);
  }
  started++;
  c->started_ns = now_ns();
  start_sending(c);
}

static void on_line(Connection *c, long long now) {
  if (!memcmp(c->line, "data: [DONE]", 12)) c->done_seen = 1;
  char *at = memmem(c->line, c->line_length, "\"t=", 3);
  if (!at) return;
  chunks++;
  if (!c->chunks++) add(&first_chunk_us, (now - c->started_ns) / 1e3);
  add(&chunk_delay_us, (now - strtoll(at + 3, NULL, 10)) / 1e3);
}

static void on_payload(Connection *c, const char *bytes, size_t length, long long now) {
  if (!c->request->is_stream) return;
  while (length) {
    const char *end = memchr(bytes, '\n', length);
    size_t n = end ? (size_t)(end - bytes) : length, room = LINE_SIZE - 1 - c->line_length, kept = n < room ? n : room;
    memcpy(c->line + c->line_length, bytes, kept);
    c->line_length += kept;
    if (end) {
      c->line[c->line_length] = 0;
      on_line(c, now);
      c->line_length = 0;
      n++;
    }
    bytes += n;
    length -= n;
  }
}

// Takes bytes of the head; returns how many of them belonged to it.
static size_t on_head(Connection *c, const char *bytes, size_t length) {
  size_t before = c->head_length, room = HEAD_SIZE - 1 - before, kept = length < room ? length : room;
  memcpy(c->head + before, bytes, kept);
  c->head_length += kept;
  c->head[c->head_length] = 0;
  char *end = strstr(c->head, "\r\n\r\n");
  if (!end) return kept;
  c->status = atoi(c->head + 9);
  c->place = BODY_TO_END;
  for (char *line = c->head; line < end; line = strstr(line, "\r\n") + 2) {
    if (!strncasecmp(line, "content-length:", 15)) c->place = BODY_BY_LENGTH, c->left = atoll(line + 15);
    else if (!strncasecmp(line, "transfer-encoding:", 18)) c->place = CHUNK_SIZE, c->left = 0;
    else if (!strncasecmp(line, "connection: close", 17)) c->close_after = 1;
  }
  return end + 4 - c->head - before;
}

static int hex(char digit) { return digit <= '9' ? digit - '0' : (digit | 32) - 'a' + 10; }

// Takes bytes of an answer; 1 once it is whole.
static int on_bytes(Connection *c, const char *at, size_t length, long long now) {
  const char *end = at + length;
  while (at < end || (c->place == BODY_BY_LENGTH && !c->left)) {
    size_t n = end - at;
    switch (c->place) {
      case HEAD:
        n = on_head(c, at, n);
        if (c->place == HEAD && c->head_length == HEAD_SIZE - 1) return 1;  // no head is that long: status 0 fails it
        break;
      case BODY_BY_LENGTH:
      case CHUNK_DATA:
        if ((long long)n > c->left) n = c->left;
        on_payload(c, at, n, now);
        c->left -= n;
        if (!c->left && c->place == BODY_BY_LENGTH) return 1;
        if (!c->left) c->place = CHUNK_END;
        break;
      case BODY_TO_END:
        on_payload(c, at, n, now);
        break;
      case CHUNK_SIZE:
        n = 1;
        if (*at == '\n') c->place = c->left ? CHUNK_DATA : TRAILER;
        else if (*at != '\r') c->left = 16 * c->left + hex(*at);
        break;
      case CHUNK_END:
        n = 1;
        if (*at == '\n') c->place = CHUNK_SIZE;
        break;
      case TRAILER:  // none is ever sent: what is left is an empty line
        n = 1;
        if (*at == '\n') return 1;
    }
    at += n;
  }
  return 0;
}

static void on_readable(Connection *c) {
  static char bytes[262144];
  ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
  if (n > 0) {
    if (on_bytes(c, bytes, n, now_ns())) finish(c, 1);
  } else if (n == 0 || errno != EAGAIN) {
    disconnect(c);
    if (!c->request) return;  // idle
    if (c->reused && c->place == HEAD && !c->head_length) start_sending(c);  // closed while idle
    else finish(c, c->place == BODY_TO_END);
  }
}

static void on_event(Connection *c, unsigned events) {
  if (c->connecting) {
    int error = 0;
    socklen_t size = sizeof error;
    c->connecting = 0;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size) || error) finish(c, 0);
    else send_rest(c);
    return;
  }
  if (events & EPOLLOUT) send_rest(c);
  if (c->fd >= 0 && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
}

int main(int argc, char **argv) {
  long long connections = 1;
  if (argc < 3 || argc % 2 == 0) return fprintf(stderr, "usage: load PORT BODIES --connections C --requests N --stamp S\n"), 2;
  port = atoi(argv[1]);
  for (int i = 3; i < argc; i += 2) {
    long long *option = !strcmp(argv[i], "--connections") ? &connections
                        : !strcmp(argv[i], "--requests")  ? &wanted
                        : !strcmp(argv[i], "--stamp")     ? &stamp
                                                          : NULL;
    if (!option) return fprintf(stderr, "load: no option %s\n", argv[i]), 2;
    *option = atoll(argv[i + 1]);
  }
  read_bodies(argv[2]);
  poller = epoll_create1(0);
  Connection *all = calloc(connections, sizeof *all);
  long long start = now_ns();
  for (int i = 0; i < connections; i++) all[i].fd = -1, begin(&all[i]);
  struct epoll_event events[MAX_EVENTS];
  while (finished < wanted) {
    if (now_ns() - start > HARD_STOP_NS) return fprintf(stderr, "load: %lld of %lld answered\n", finished, wanted), 1;
    int n = epoll_wait(poller, events, MAX_EVENTS, 1000);
    for (int i = 0; i < n; i++)
      if (((Connection *)events[i].data.ptr)->fd >= 0) on_event(events[i].data.ptr, events[i].events);
  }
  printf("{\"ok\": %zu, \"failed\": %lld, \"incomplete\": %lld, \"chunks\": %lld, \"seconds\": %.4f, \"request_us\": %.1f, "
         "\"first_chunk_us\": %.1f, \"chunk_delay_us\": %.1f}\n",
         request_us.count, failed, incomplete, chunks, (now_ns() - start) / 1e9, median(&request_us),
         median(&first_chunk_us), median(&chunk_delay_us));
  return 0;
}
